"""data.document_mask: positions restart with each document of a window; what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmtrain.config.data import TextFilesSection
from llmtrain.config.mixture import MixtureSection
from llmtrain.core.targets import IGNORE_INDEX
from llmtrain.data.base import PreparedData
from llmtrain.data.make_batches import make_batches
from llmtrain.data.mixture.prepare import Mixture
from llmtrain.data.store.token_store import TokenStore
from llmtrain.data.text.window_batches import WindowBatches, WindowEvalBatches, document_positions
from llmtrain.data.tokenizers.byte import ByteTokenizer
from llmtrain.errors import UsageError

END = 9


def test_positions_restart_after_each_end_of_text() -> None:
    rows = np.array([[1, 2, END, 3, 4, END], [END, END, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6]])
    expected = [[0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]
    assert document_positions(rows, END).tolist() == expected


def store(count: int) -> TokenStore:
    return TokenStore(Path("tokens"), (np.arange(count) % 10).astype(np.uint8))


def test_windows_keep_their_tokens() -> None:
    plain = WindowBatches(store(500), 16, 4, 1, 1, 10)[3]
    masked = WindowBatches(store(500), 16, 4, 1, 1, 10, END)[3]
    assert plain.positions is None
    assert masked.positions is not None
    assert torch.equal(masked.inputs, plain.inputs)
    assert torch.equal(masked.targets, plain.targets)
    starts = masked.positions == 0
    assert bool((masked.inputs[starts][1:] == 0).sum() > 4)
    assert torch.equal(starts[:, 1:], masked.inputs[:, :-1] == END)


def test_padded_validation_windows_have_positions() -> None:
    last = list(WindowEvalBatches(store(100), 8, 8, 10, None, END))[-1]
    assert last.positions is not None
    assert last.positions.shape == last.inputs.shape == (8, 8)
    assert last.positions[-1].tolist() == list(range(8))


def test_mixture_of_text(tmp_path: Path) -> None:
    sources = []
    for letter in "ab":
        (tmp_path / f"{letter}.jsonl").write_text(f'{{"text": "{letter * 5}"}}\n' * 200)
        source = {"name": "text_files", "files": [str(tmp_path / f"{letter}.jsonl")], "text_column": "text"}
        sources.append({**source, "weight": 1})
    values: dict[str, Any] = {"sources": sources, "tokenizer": "byte", "cache_dir": str(tmp_path / "cache")}
    section = MixtureSection(**values, document_mask=True)
    assert [each.document_mask for each in section.sections()] == [True, True]  # type: ignore[attr-defined]
    train, val = make_batches(
        Mixture(section, 1).prepare(1),
        section,
        block_size=32,
        micro_batch_size=4,
        micro_batches=1,
        seed=7,
        vocab_size=256,
        eval_limit=None,
        can_pack=True,
    )
    for batch in (train[0], val[0]):
        assert batch.positions is not None
        is_real = batch.targets[:, 0] != IGNORE_INDEX  # not padding
        starts = batch.positions[is_real, 1:] == 0
        assert torch.equal(starts, batch.inputs[is_real, :-1] == 0)  # 0 is the end of text of bytes
        assert starts.any()


def test_model_and_tokenizer_that_cannot_are_refused() -> None:
    class NoEnd(ByteTokenizer):
        end_of_text = None

    section = TextFilesSection(files=["a.txt"], document_mask=True)
    for tokenizer, can_pack in ((ByteTokenizer(), False), (NoEnd(), True)):
        with pytest.raises(UsageError, match="document_mask"):
            make_batches(
                PreparedData(tokenizer, store(500), store(500), ""),
                section,
                block_size=8,
                micro_batch_size=1,
                micro_batches=1,
                seed=0,
                vocab_size=256,
                eval_limit=None,
                can_pack=can_pack,
            )


TEXT = "{name: text_files, files: [a.txt], weight: 1}"
CHAT = "{name: chat_jsonl, train_file: a.jsonl, weight: 1}"


@pytest.mark.parametrize(
    ("preset", "values", "where"),
    [
        ("gpt_smoke", ["data.document_mask=true"], "data.document_mask"),
        ("continue_pretrain", ["data.document_mask=7"], "data.document_mask"),
        ("lora_instruct", ["data.document_mask=true"], "data.document_mask"),
        ("mixture_text", ["data.document_mask=true"], "data.document_mask"),
        ("mixture_instruct", ["data.document_mask=true"], "data.document_mask"),
        ("mixture_text", [f"data.sources=[{TEXT[:-1]}, document_mask: true}}]"], "belongs to the mixture"),
        ("mixture_instruct", [f"data.sources=[{CHAT[:-1]}, document_mask: true}}]"], "belongs to the mixture"),
    ],
)
def test_refused_configs(cli: Callable[..., Any], preset: str, values: list[str], where: str) -> None:
    done = cli("validate", "--config", preset, *(part for value in values for part in ("--set", value)))
    assert done.code == 64, done.err
    assert where in done.err
    assert done.err.count("document_mask") <= 3
    assert "Traceback" not in done.err
