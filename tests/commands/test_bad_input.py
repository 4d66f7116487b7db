"""A table of bad inputs: each ends with 64 or 65 and one clear message, and leaves nothing behind."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llmtrain.data.content_hash import stamp

# Nine lists, each nine times the one before: 500 bytes that stand for 9^9 values.
LAUGHS = b"a0: &a0 [x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 10)
)

SIZES = (
    "trainer.max_steps",
    "trainer.micro_batch_size",
    "trainer.grad_accum_steps",
    "trainer.log_every_steps",
    "trainer.eval_every_steps",
    "trainer.eval_batches",
    "trainer.save_every_steps",
    "trainer.schedule_steps",
    "trainer.lr",
    "trainer.max_grad_norm",
    "model.block_size",
    "model.d_model",
    "model.n_layers",
    "model.n_heads",
    "model.d_ff",
    "model.vocab_size",
    "run.threads",
)
RUN_IDS = ("../evil", "..", ".", "a/b", "/tmp/evil", "Evil", "x", "a" * 41, "evil.", "e vil", "-evil", "evil\n", "''")

# (problem, overrides, exit code, facts in the message)
TABLE = [
    # the config
    ("unknown field", ["trainer.max_step=5"], 64, ["trainer.max_step", "Did you mean 'max_steps'"]),
    ("unknown section", ["trainr.lr=1"], 64, ["'trainr'", "Did you mean 'trainer'"]),
    ("wrong type", ["trainer.max_steps=ten"], 64, ["trainer.max_steps", "integer", "'ten'"]),
    ("no value at all", ["trainer.max_steps"], 64, ["section.field=value"]),
    ("two problems", ["trainer.lr=x", "run.seed=y"], 64, ["2 problems", "trainer.lr", "run.seed"]),
    (
        "heads that do not fit",
        ["model.name=gpt", "model.d_model=30", "model.n_heads=4"],
        64,
        ["30 is not divisible by model.n_heads 4"],
    ),
    ("unknown model", ["model.name=gtp"], 64, ["'gtp'", "dummy_gpt, gpt"]),
    ("unknown data", ["data.name=tex_files"], 64, ["'tex_files'", "text_files"]),
    ("warm-up longer than the run", ["trainer.warmup_steps=50"], 64, ["warmup_steps 50"]),
    ("min_lr above lr", ["trainer.min_lr=5"], 64, ["min_lr"]),
    *((f"zero {name}", [f"{name}=0"], 64, [name]) for name in SIZES),
    *(
        (f"huge {name}", [f"{name}=99999999999999999999999"], 64, [name])
        for name in (*(size for size in SIZES if size not in ("trainer.lr", "trainer.max_grad_norm")), "run.seed")
    ),
    *((f"negative {name}", [f"{name}=-1"], 64, [name]) for name in SIZES),
    *((f"{value} as a rate", [f"trainer.lr={value}"], 64, ["trainer.lr"]) for value in (".nan", ".inf", "-1.0")),
    *((f"run id {run_id!r}", [f"output.run_id={run_id}"], 64, ["output.run_id", "2 to 40"]) for run_id in RUN_IDS[:10]),
    ("log file elsewhere", ["logging.file_name=../evil.log"], 64, ["logging.file_name"]),
    # the machine
    ("output is a file", ["output.root_dir=file.txt"], 64, ["Cannot write to file.txt", "output.root_dir"]),
    ("output below a file", ["output.root_dir=file.txt/runs"], 64, ["Cannot write", "output.root_dir"]),
    ("cache is a file", ["data.cache_dir=file.txt"], 64, ["file.txt", "data.cache_dir"]),
    ("cache below a file", ["data.cache_dir=file.txt/x"], 64, ["file.txt/x", "data.cache_dir"]),
    (
        "too many processes for the step",
        [
            "trainer.grad_accum_steps=1",
            "distributed.world_size=2",
            "distributed.rank=0",
            "distributed.master_addr=127.0.0.1",
        ],
        64,
        ["trainer.grad_accum_steps", "scale_batch"],
    ),
    # the data
    ("no files named", ["data.name=text_files"], 64, ["data.files is empty"]),
    ("no dataset named", ["data.name=hf_text"], 64, ["data.dataset_name is empty"]),
    ("missing file", ["data.name=text_files", "data.files=[nowhere.txt]"], 65, ["nowhere.txt", "data.files"]),
    ("empty file", ["data.name=text_files", "data.files=[empty.txt]"], 65, ["empty.txt", "empty"]),
    ("directory as file", ["data.name=text_files", "data.files=[.]"], 65, ["data.files"]),
    (
        "empty validation file",
        ["data.name=text_files", "data.files=[text.txt]", "data.val_files=[empty.txt]"],
        65,
        ["data.val_files", "empty"],
    ),
    (
        "missing validation file",
        ["data.name=text_files", "data.files=[text.txt]", "data.val_files=[nowhere.txt]"],
        65,
        ["data.val_files", "nowhere.txt"],
    ),
    (
        "validation split empty",
        ["data.name=hf_text", "data.files=[rows.jsonl]", "data.val_files=[blank.jsonl]"],
        65,
        ["validation text is empty"],
    ),
    (
        "missing column",
        ["data.name=hf_text", "data.files=[rows.jsonl]", "data.text_column=body"],
        65,
        ["'body'", "Known: text"],
    ),
    ("invalid UTF-8", ["data.name=text_files", "data.files=[bad.txt]"], 65, ["bad.txt", "line 2", "byte 9", "0xff"]),
    (
        "block longer than the data",
        ["data.name=text_files", "data.files=[text.txt]", "model.block_size=5000"],
        65,
        ["training", "model.block_size 5000", "5001"],
    ),
    (
        "block longer than the validation data",
        ["data.name=text_files", "data.files=[text.txt]", "data.val_fraction=0.01"],
        65,
        ["validation", "model.block_size"],
    ),
    ("vocabulary too small", ["model.vocab_size=100"], 64, ["model.vocab_size", "256", "100"]),
    ("no such tokenizer", ["data.tokenizer=nowhere"], 64, ["'nowhere'", "byte, char, gpt2"]),
    ("directory without a tokenizer", ["data.tokenizer=folder"], 65, ["folder", "tokenizer.json"]),
    (
        "muon without matrices",
        ["model.name=dummy_gpt", "trainer.optimizer=muon"],
        64,
        ["muon", "dummy_gpt", "Set trainer.optimizer to adamw."],
    ),
    ("momentum out of range", ["trainer.optimizer=muon", "trainer.momentum=1.0"], 64, ["trainer.momentum"]),
    (
        "initial weights missing",
        ["model.name=gpt", "model.n_heads=2", "model.init=nowhere"],
        64,
        ["model.init", "nowhere"],
    ),
]


@pytest.fixture
def inputs(workdir: Path) -> Path:
    (workdir / "file.txt").write_text("x")
    (workdir / "empty.txt").write_text("")
    (workdir / "text.txt").write_text("some text of the usual kind\n" * 20)
    (workdir / "odd.txt").write_text("some text with a Ж in it\n" * 20)
    (workdir / "bad.txt").write_bytes(b"fine\nnot \xff\n" * 20)
    (workdir / "rows.jsonl").write_text('{"text": "a row of text, long enough"}\n' * 20)
    (workdir / "blank.jsonl").write_text('{"text": ""}\n')
    (workdir / "folder").mkdir()
    return workdir


@pytest.fixture
def unchanged(inputs: Path) -> Callable[[], bool]:
    """Whether the current directory, with files and runs, is unchanged."""

    def look() -> dict[Path, bytes | None]:
        return {path: path.read_bytes() if path.is_file() else None for path in inputs.rglob("*")}

    before = look()
    return lambda: look() == before


def assert_refused(done, code: int, words: list[str]) -> None:
    assert "Traceback" not in done.err
    assert done.code == code, done.err
    message = done.err[done.err.index("error: ") :]
    for word in words:
        assert word in message


@pytest.mark.parametrize(("overrides", "code", "words"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_bad_input(train, unchanged, overrides: list[str], code: int, words: list[str]) -> None:
    done = train(*overrides)
    assert_refused(done, code, words)
    assert done.out == ""
    assert unchanged()


@pytest.mark.parametrize(("overrides", "code", "words"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_dry_run_reports_bad_input_too(train, unchanged, overrides: list[str], code: int, words: list[str]) -> None:
    if "output.root_dir" in " ".join(overrides):
        pytest.skip("a dry run writes no output")
    done = train(*overrides, more=["--dry-run", "--json"])
    assert_refused(done, code, words)
    assert done.json["exit_code"] == code
    assert unchanged()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_without_gpu_is_refused(train, unchanged) -> None:
    assert_refused(train("run.device=cuda"), 64, ["cuda", "run.device"])
    assert unchanged()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"trainer: {lr: [", ["not valid YAML"]),
        (b"- a\n- b\n", ["mapping of sections"]),
        (b"trainer:\n  lr: 1\n  lr: 2\n", ["'lr'", "line 3"]),
        (b"schema_version: 9\n", ["schema_version 9", "Known: 1, 2, 3"]),
        (b"schema_version: 3\nddp: {}\n", ["distributed"]),
        (b"trainer:\n  lr: fast\n", ["line 2: trainer.lr", "'fast'"]),
        (b"\xff\xfe", ["cannot be read"]),
        (b"run: &a\n  name: *a\n", ["not valid YAML"]),
        (b"run:\n  name: " + b"[" * 5000, ["not valid YAML"]),
        (b"run: {name: 0x" + b"f" * 5000 + b"}", ["run.name"]),
        (LAUGHS, ["not valid YAML"]),
        (LAUGHS.replace(b"[", b"{<<: [").replace(b"]", b"]}").replace(b"{<<: [x]}", b"{x: 1}"), ["not valid YAML"]),
        (b"a: &a {}\nb: {<<: *a}\n", ["problem"]),
    ],
)
def test_bad_config_files(cli, unchanged, inputs: Path, content: bytes, words: list[str]) -> None:
    path = inputs.parent / "config.yaml"
    path.write_bytes(content)
    for verb in ("validate", "train", "print-config"):
        assert_refused(cli(verb, "--config", path), 64, [str(path), *words])
    assert unchanged()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("my-gtp.yaml", "'my-gpt.yaml'"),
        ("my-gpt", "'my-gpt.yaml'"),
        ("gpt_smok", "'gpt_smoke'"),
        ("./my-gp.yml", "my-gpt"),
    ],
)
def test_similar_config_is_suggested(cli, workdir: Path, typed: str, meant: str) -> None:
    (workdir / "my-gpt.yaml").write_text("schema_version: 3\n")
    done = cli("validate", "-c", typed)
    assert done.code == 64
    assert "Did you mean" in done.err
    assert meant in done.err


def test_missing_base_is_suggested(cli, workdir: Path) -> None:
    (workdir / "my-gpt.yaml").write_text("schema_version: 3\n")
    (workdir / "mine.yaml").write_text("schema_version: 3\nextends: my-gtp.yaml\n")
    done = cli("validate", "-c", "mine.yaml")
    assert done.code == 64
    assert "my-gpt.yaml" in done.err


@pytest.mark.parametrize("words", [["-c", "nope"], ["--set", "trainer.loss=dpo"]])
def test_long_list_of_names_is_shortened(cli, words: list[str]) -> None:
    done = cli("validate", *words)
    assert done.code == 64
    assert " more." in done.err
    assert max(map(len, done.err.splitlines())) < 200


@pytest.mark.parametrize(
    ("typed", "meant"), [("run.device=gpu", "cuda"), ("trainer.precision=bfloat16", "bf16"), ("run.device=cda", "cuda")]
)
def test_value_of_other_tools_is_suggested(cli, typed: str, meant: str) -> None:
    done = cli("validate", "--set", typed)
    assert done.code == 64
    assert f"Did you mean '{meant}'?" in done.err


@pytest.mark.parametrize("name", ["nowhere.yaml", "gpt_smok", "folder", "no/where", ""])
def test_missing_config_files(cli, unchanged, name: str) -> None:
    assert_refused(cli("train", "--config", name), 64, [name])
    assert unchanged()


@pytest.mark.parametrize("run", RUN_IDS)
@pytest.mark.parametrize("verb", [["generate", "--run"], ["runs", "show"], ["train", "--resume"]], ids=" ".join)
def test_run_outside_the_root_is_refused(cli, unchanged, verb: list[str], run: str) -> None:
    done = cli(*verb, run)
    assert_refused(done, 64, [])
    assert "run" in done.err.lower() or "option" in done.err
    assert unchanged()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write anything")
@pytest.mark.parametrize("mode", [0o000, 0o500])
@pytest.mark.parametrize("field", ["data.cache_dir", "output.root_dir"])
def test_missing_permission_is_refused(train, inputs: Path, field: str, mode: int) -> None:
    locked = inputs / "locked"
    locked.mkdir(mode=mode)
    try:
        for place in (locked, locked / "deeper"):
            assert_refused(train(f"{field}={place}"), 64, [field])
    finally:
        locked.chmod(0o700)
    assert list(locked.iterdir()) == []


def test_token_ids_out_of_range(train, unchanged, tmp_path: Path) -> None:
    """A token store that was damaged after its verification, without a change of its metadata (by the disk)."""
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    assert train(cache, "data.tokenizer=char", more=["--dry-run"]).code == 0
    (tokens,) = (tmp_path / "cache").rglob("train.bin")
    tokens.write_bytes(b"\xff" * tokens.stat().st_size)
    verified = tokens.with_name("verified.json")
    verified.write_text(json.dumps({**json.loads(verified.read_text()), tokens.name: stamp(tokens)}))
    assert_refused(train(cache, "data.tokenizer=char"), 65, ["Token id 255", "train.bin"])
    assert unchanged()


class TestAnotherModel:
    """A checkpoint of another model or run, and files that resemble one."""

    @pytest.fixture
    def run(self, train, inputs: Path) -> Path:
        assert train("output.run_id=mine").code == 0
        return inputs / "runs" / "mine"

    @pytest.fixture
    def same(self, run: Path) -> Callable[[], bool]:
        """Whether the run can still be resumed unchanged: only log lines and the record of the start were added."""

        def look() -> dict[str, bytes]:
            files = [path for path in run.rglob("*") if path.is_file() and path.parent.name != "logs"]
            return {
                str(path): path.read_bytes()
                for path in files
                if path.name != "generations.json" and path.parent.name != "exits"
            }

        before = look()
        return lambda: look() == before

    @pytest.mark.parametrize(
        ("override", "words"),
        [
            ("model.d_model=32", ["model.d_model: 16 -> 32"]),
            ("model.name=gpt", ["model.name: 'dummy_gpt' -> 'gpt'"]),
            ("run.seed=5", ["run.seed: 1337 -> 5"]),
            ("trainer.lr=0.5", ["trainer.lr: 0.01 -> 0.5"]),
            ("data.tokenizer=char", ["data_fingerprint", "vocab_size: 256", "data.tokenizer: None -> 'char'"]),
        ],
    )
    def test_changed_config_is_refused(self, train, same, override: str, words: list[str]) -> None:
        more = ["--resume", "mine"]
        done = train(override, "trainer.max_steps=6", more=more)
        assert_refused(done, 64, [*words, "--allow-config-change"])
        assert same()

    def test_mismatched_tensors_are_refused(self, train, same) -> None:
        more = ["--resume", "mine", "--allow-config-change"]
        assert_refused(train("model.d_model=32", "trainer.max_steps=6", more=more), 65, ["another model"])
        assert same()

    def test_existing_run_is_refused(self, train, same) -> None:
        assert_refused(train("output.run_id=mine"), 64, ["'mine' already exists", "--resume mine"])
        assert same()

    @pytest.mark.parametrize("name", ["step_99", "step_99.pt", "nonsense", "", "../../../etc/step_2"])
    def test_missing_checkpoint_is_refused(self, cli, run: Path, same, name: str) -> None:
        done = cli("train", "--resume", f"{run}/checkpoints/{name}", "--set", "trainer.max_steps=6")
        assert "Traceback" not in done.err
        assert done.code in (64, 65)
        assert same()

    def test_pickle_is_refused(self, train, run: Path) -> None:
        shutil.rmtree(run / "checkpoints" / "step_2")
        (run / "checkpoints" / "step_2.pt").write_bytes(b"cos\nsystem\n(S'touch evil'\ntR.")
        done = train("trainer.max_steps=6", more=["--resume", str(run / "checkpoints" / "step_2.pt")])
        assert_refused(done, 65, ["pickle"])
        assert not Path("evil").exists()

    def test_run_without_tokenizer_is_refused(self, cli, run: Path) -> None:
        shutil.rmtree(run / "tokenizer")
        assert_refused(cli("generate", "--run", "mine"), 65, ["tokenizer"])

    def test_changed_tokenizer_is_refused(self, cli, run: Path) -> None:
        characters = json.dumps({"kind": "char", "characters": "".join(map(chr, range(40, 400)))})
        (run / "tokenizer" / "llmtrain_tokenizer.json").write_text(characters)
        done = cli("generate", "--run", "mine")
        assert "Traceback" not in done.err
        assert done.code == 65


def test_files_without_a_data_name_that_reads_them_are_refused(cli) -> None:
    """Forgetting data.name must not train on something else."""
    done = cli("validate", "--set", "data.files=[corpus/*.txt]")
    assert done.code == 64
    assert "data.files" in done.err
    assert "text_files" in done.err


def test_lower_max_steps_is_refused(train) -> None:
    assert train("output.run_id=mine").code == 0
    done = train("trainer.max_steps=1", more=["--resume", "mine"])
    assert done.code == 64
    assert "trainer.max_steps" in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train", "--lr", "3e-4"], 64, "--set trainer.lr=3e-4"),
        (["train", "--max-steps=5"], 64, "--set trainer.max_steps=5"),
        (["generate", "--max-new-tokens", "0"], 64, "at least 1"),
        (["init", "--text", "corpus"], 65, ".txt"),
    ],
)
def test_remedy_of_wrong_arguments(cli, workdir: Path, arguments: list[str], code: int, words: str) -> None:
    (workdir / "corpus").mkdir()
    done = cli(*arguments)
    assert (done.code, words in done.err) == (code, True), done.err
