"""Loads an export in a new process with the libraries it is for, and compares."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from llmtrain.config.model import HfCausalLmSection
from llmtrain.core.install import install_command
from llmtrain.core.text import one_line
from llmtrain.data.tokenizers.chat_template import DATE
from llmtrain.errors import DataError
from llmtrain.inference.export_check.expected import (
    MESSAGES,
    POSITIONS,
    Expected,
    as_ids,
    logits_error,
    merged_logits_error,
)
from llmtrain.inference.export_check.rounding import ROUNDING
from llmtrain.inference.gguf.write import is_read_by_transformers
from llmtrain.inference.load import LoadedModel

CHECK = "export-check.json"
TOLERANCE = 1e-4
"""Root mean square of the errors of the logits, relative to theirs. Both sides compute in float32 with the same rounded
weights; the tests have errors below 1e-5."""
TIE = 2
"""Two tokens are a tie if their logits differ by less than this many tolerances."""


@dataclass(frozen=True)
class Target:
    """What was written, and how to load it. `base`: the directory of the base model of an adapter; `file`: of GGUF, of
    which transformers may get other token ids than llama.cpp."""

    dtype: str
    base: Path | None = None
    file: str | None = None
    has_ids_in_transformers: bool = True
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Check:
    """What was compared, as export-check.json has it."""

    loaded_with: dict[str, str]
    texts: int
    tokens: int
    special_tokens: dict[str, int | None]
    chat_template: bool
    logits: int
    """Number of positions."""
    logits_error: float
    tolerance: float
    dtype: str
    rounding_error: float
    """The same between the model before and after its weights were rounded to `dtype`."""
    continuation: str
    """Greedy, as the model writes it."""
    continuation_tokens: int
    equal_tokens: int
    """Fewer than continuation_tokens only where two tokens are equally likely but for rounding, or where a text ends
    for one of the two programs."""
    llama_cpp_equal_tokens: int | None
    """The same by llama.cpp; None if it was not asked."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def note(self) -> str:
        """For a model card."""
        return "\n".join(f"- {line}" for line in self.lines())

    def lines(self) -> list[str]:
        """The result in three lines."""
        versions = ", ".join(f"{name} {version}" for name, version in self.loaded_with.items() if name != "torch")
        template = ", chat template" if self.chat_template else ""
        count = self.continuation_tokens
        greedy = f"{self.equal_tokens} of {count} tokens"
        if self.equal_tokens < count:
            greedy += ", then the end or a tie"
        if self.llama_cpp_equal_tokens is not None:
            greedy += f"; llama.cpp: {self.llama_cpp_equal_tokens} of {count}"
        logits = f"logits differ by {self.logits_error:.1e} of their size ({self.dtype}: at most {self.tolerance:.0e})"
        if self.dtype != "float32":
            logits += f"; rounding changed them by {self.rounding_error:.1e}"
        tokens = f"{self.texts} texts have the same {self.tokens} token ids, special tokens{template}"
        return [
            f"checked with {versions}: {tokens}",
            logits,
            f"greedy continuation: the same {greedy}",
        ]


def why_unchecked(loaded: LoadedModel, format_: str) -> str | None:
    """Why an export of this model cannot be checked here; None if it can."""
    if loaded.adapter.export_config() is None:
        return "its format is that of a plugin"
    if any(getattr(parameter, "quant_state", None) is not None for parameter in loaded.module.parameters()):
        return "the model in memory is quantized to 4 bits (the command `llmtrain export` loads it as it is stored)"
    if str(getattr(loaded.adapter, "attention", "")).startswith("flash"):
        return "the model in memory uses flash attention, which does not compute in float32"
    packages = ["transformers"]
    if isinstance(loaded.config.model, HfCausalLmSection):
        packages.append("peft")
    if format_ == "gguf":
        packages.append("accelerate")
        if not is_read_by_transformers(loaded):
            packages.append("xllamacpp")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        remedy = "pip install xllamacpp" if missing == ["xllamacpp"] else install_command("hf")
        return f"{' and '.join(missing)} is not installed ({remedy})"
    return None


def check_merged(loaded: LoadedModel, expected: Expected) -> None:
    """Raises DataError if merging the adapters has changed what the model computes."""
    error = merged_logits_error(loaded, expected)
    if not error <= TOLERANCE:
        raise _differs([f"logits differ by {error:.1e} of their size after the adapters were merged"])


def check_export(folder: Path, expected: Expected, target: Target) -> Check:
    """Load the export in a new process and compare; raises DataError with everything that differs."""
    with tempfile.TemporaryDirectory() as work:
        request = _request(folder, expected, target)
        (Path(work) / "request.json").write_text(json.dumps(request))
        found = _run(Path(work))
        logits = _read_logits(Path(work)) if "error" not in found else {}
        return _compare(expected, target, found, logits)


def _request(folder: Path, expected: Expected, target: Target) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "base": str(target.base) if target.base else None,
        "file": target.file,
        "trust_remote_code": target.trust_remote_code,
        "texts": expected.texts,
        "messages": MESSAGES if expected.conversation is not None else None,
        "date": DATE,
        "sequences": expected.sequences,
        "positions": POSITIONS,
        "prompt": expected.prompt,
        "max_new_tokens": len(expected.continuation),
        "context_length": expected.context_length,
    }


def _run(work: Path) -> dict[str, Any]:
    script = Path(__file__).with_name("load_export.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    # -P: the modules of this directory must not hide others.
    ended = subprocess.run(
        [sys.executable, "-P", str(script), str(work)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env=environment,
        check=False,
    )
    if ended.returncode == 0:
        return dict(json.loads((work / "result.json").read_text()))
    reason = one_line(ended.stderr.strip().rpartition("\n")[2], 300) or "it printed nothing"
    if ended.returncode < 0:
        reason = f"signal {-ended.returncode}; the memory may not have been enough"
    raise DataError(
        f"The process that checks the export ended with exit code {ended.returncode}: {reason}. Nothing was written.",
        remedy="Run the same command again. --no-check writes the export unchecked.",
    )


def _read_logits(work: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = load_file(work / "logits.safetensors")
    return tensors


def _compare(expected: Expected, target: Target, found: dict[str, Any], logits: dict[str, torch.Tensor]) -> Check:
    if "error" in found:
        error = found["error"]
        raise _differs([f"the {error['part']} cannot be loaded: {one_line(error['what'], 300)}"])
    problems = _tokenizer_problems(expected, found["tokenizer"])
    if target.has_ids_in_transformers:
        problems = _id_problems(expected, found["tokenizer"]["ids"]) + problems
    if target.base is None:
        problems += _stop_problems(expected, found, is_one=target.file is not None)
    theirs = [logits[str(index)] for index in range(len(expected.sequences))]
    error = logits_error(expected.logits, theirs)
    if not error <= TOLERANCE:
        problems.append(f"logits differ by {error:.1e} of their size; with equal weights at most {TOLERANCE:.0e}")
    equal, problem = _equal_tokens(expected, found["model"], TOLERANCE)
    problems += problem
    llama_cpp = None
    if "llama_cpp" in found:
        problems += _id_problems(expected, found["llama_cpp"]["ids"], "llama.cpp: ")
        # llama.cpp rounds the activations too.
        llama_cpp, problem = _equal_tokens(expected, found["llama_cpp"], ROUNDING[target.dtype], "llama.cpp: ")
        problems += problem
    if problems:
        raise _differs(problems)
    return Check(
        loaded_with=found["versions"],
        texts=len(expected.texts),
        tokens=sum(map(len, expected.ids)),
        special_tokens=found["tokenizer"]["special_tokens"],
        chat_template=expected.conversation is not None,
        logits=sum(map(len, theirs)),
        logits_error=error,
        tolerance=TOLERANCE,
        dtype=target.dtype,
        rounding_error=expected.rounding_error,
        continuation=expected.continued_text,
        continuation_tokens=len(expected.continuation),
        equal_tokens=equal,
        llama_cpp_equal_tokens=llama_cpp,
    )


def _tokenizer_problems(expected: Expected, found: dict[str, Any]) -> list[str]:
    problems = []
    for name, token in expected.special_tokens.items():
        if found["special_tokens"][name] != token:
            problems.append(f"{name} of the tokenizer is {found['special_tokens'][name]}, not {token}")
    if found["conversation"] != expected.conversation:
        problems.append(f"the chat template writes {found['conversation']!r}, not {expected.conversation!r}")
    return problems


def _id_problems(expected: Expected, found: list[list[int]], by: str = "") -> list[str]:
    problems = []
    for text, ours, theirs in zip(expected.texts, expected.ids, found, strict=True):
        if ours != theirs:
            problems.append(f"{by}{text[:60]!r} has the token ids {_shown(theirs)}, not {_shown(ours)}")
    return problems


def _shown(ids: list[int]) -> str:
    return f"{ids[:12]}".replace("]", ", ...]" if len(ids) > 12 else "]")


def _stop_problems(expected: Expected, found: dict[str, Any], is_one: bool) -> list[str]:
    """`is_one`: the format has room for one token: the tokenizer's end of text, or one of those of the model."""
    ids = as_ids(found["model"]["eos"])
    if ids == set(expected.stop_ids):
        return []
    if is_one and len(ids) == 1 and ids <= {*expected.stop_ids, expected.special_tokens["eos_token_id"]}:
        return []
    return [f"generation stops at the tokens {sorted(ids)}, not {expected.stop_ids}"]


def _equal_tokens(expected: Expected, answer: dict[str, Any], tolerance: float, by: str = "") -> tuple[int, list[str]]:
    """How many tokens of the continuation are equal, and whether the next one is a mistake rather than a tie, or the
    end of the text: formats differ in how many tokens they can name that end one."""
    found = answer["continuation"]
    for index, token in enumerate(expected.continuation):
        if index >= len(found):
            if answer["has_ended"]:
                return index, []
            return index, [f"{by}the greedy continuation ends after {index} tokens, before {token}"]
        if found[index] != token:
            if _is_tie(expected.choices[index], token, found[index], tolerance):
                return index, []
            return index, [f"{by}token {index + 1} of the greedy continuation is {found[index]}, not {token}"]
    return len(expected.continuation), []


def _is_tie(logits: torch.Tensor, ours: int, theirs: int, tolerance: float) -> bool:
    size = float((logits - logits.mean()).square().mean().sqrt())
    return theirs < len(logits) and float(logits[ours] - logits[theirs]) <= TIE * tolerance * size


def _differs(problems: list[str]) -> DataError:
    error = DataError(
        "\n  - ".join(["The export does not compute what the model computes. Nothing was written.", *problems]),
        remedy="Report this with the model and the versions of transformers and llmtrain. --no-check writes it anyway.",
        reason="export_differs",
    )
    error.details = {"differences": problems}
    return error
