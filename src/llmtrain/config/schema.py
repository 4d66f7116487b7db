"""The config, schema version 2: frozen, strict, one class a section, a docstring under each field.

The docstrings are the reference that users read (docs/config.md is made from them).
Checks that need more than one field are in each section's `problems`, so that all can be reported at once.
"""

# ruff: noqa: RUF012 (pydantic copies the default of a field; ruff sees that only beside the base class)

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Field

from llmtrain import registry
from llmtrain.config.launch import LaunchSection as LaunchSection
from llmtrain.config.section import RUN_ID_PATTERN as RUN_ID_PATTERN
from llmtrain.config.section import CountOrZero, Names, PositiveInt, Problem, TwoOrMoreOrAll
from llmtrain.config.section import Section as Section

SCHEMA_VERSION = 2
DEFAULT_STEPS = 1000
MAX_THREADS = 1024
S3_URI_PATTERN = r"s3://(?P<bucket>[A-Za-z0-9._-]{1,255})(?:/(?P<prefix>[^\s?#@]*))?"
VOCABULARIES = {"byte": 256, "gpt2": 50257}  # of the tokenizers that need no file
EXAMPLE_DATA = ("instruct_jsonl", "chat_jsonl")

# Which fields may differ between a run and its resumption: they do not decide the result.
# Everything else must be equal, or `--allow-config-change` must be given.
RESUME_MAY_CHANGE = frozenset(
    {
        "run.name",
        "run.device",
        "run.threads",
        "run.notes",
        "model.init",
        "model.path",
        "model.revision",
        "model.tokenizer_path",
        "model.local_files_only",
        "model.gradient_checkpointing",
        "data.cache_dir",
        "data.num_workers",
        "data.files",
        "data.val_files",
        "data.train_file",
        "data.val_file",
        "data.tokenizer",
        "trainer.max_steps",
        "trainer.max_epochs",
        "trainer.early_stopping",
        "trainer.eval_prompts",
        "trainer.eval_prompt_tokens",
        "trainer.log_every_steps",
        "trainer.eval_every_steps",
        "trainer.save_every_steps",
        "trainer.keep_checkpoints",
        "trainer.async_save",
        "distributed.*",
        "mlflow.*",
        "logging.*",
        "output.*",
        "launch.*",
    }
)  # Files, tokenizers and base models are paths: what they hold is compared by its SHA-256 instead.

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]

Files = Names


def is_host_port(text: str) -> bool:
    """Whether it is a name or an address (IPv6 in brackets) with a port."""
    match = re.fullmatch(r"(?:[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", text)
    return match is not None and 1 <= int(match[2]) <= 65535


class RunSection(Section):
    """Who the run is and what decides its numbers."""

    name: Annotated[str, Field(min_length=1, max_length=200)] = "llmtrain"
    """Human name; the run id is made from it."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1337
    """Decides initial weights, sample order and dropout. The same config and seed give the same run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; `auto` takes a GPU when there is one."""
    deterministic: bool = False
    """Only deterministic kernels. CPU runs are bit-exact without it; on a GPU it costs some speed."""
    threads: Annotated[int, Field(gt=0, le=MAX_THREADS)] | None = None
    """CPU threads per process. Empty: OMP_NUM_THREADS, else the cores divided by the processes, chosen at the first
    start and recorded, so that a resumed run uses the same number (sums depend on it)."""
    notes: str | None = None
    """Free text, kept with the run."""


class LoraSection(Section):
    """Low-rank adapters (`model.lora`): the base model stays as it is, small matrices beside its layers are trained."""

    rank: PositiveInt = 16
    """Width of the small matrices."""
    alpha: Positive = 32.0
    """Strength of the adapter: it is scaled by alpha / rank."""
    dropout: Share = 0.0
    """Dropout before the adapter, in training."""
    target_modules: Names = []
    """Layers that get an adapter, by the end of their names, such as q_proj. Empty: all linear layers but the output
    layer."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, which suits large ranks."""
    dora: bool = False
    """Train the length of each weight apart from its direction (DoRA): slower, sometimes better."""
    quantize: bool = False
    """Keep the base model in 4 bits (QLoRA). Needs a GPU and the extra `qlora`."""


class ModelSection(Section):
    """What is trained."""

    name: str = "gpt"
    """A registered model: `gpt` (GPT-2 architecture), `hf_causal_lm` (fine-tunes a Hugging Face model) or `dummy_gpt`
    (one matrix, for smoke tests)."""
    init: Annotated[str, Field(min_length=1)] = "random"
    """`gpt`: `random` (GPT-2 initialisation), or a directory in the transformers GPT-2 format to start from."""
    block_size: PositiveInt = 128
    """Context length in tokens; rows of `instruct_jsonl` and `chat_jsonl` are packed to it."""
    d_model: PositiveInt = 128
    """`gpt`: width of the residual stream."""
    n_layers: PositiveInt = 4
    """`gpt`: number of transformer blocks."""
    n_heads: PositiveInt = 4
    """`gpt`: attention heads a block; must divide d_model."""
    d_ff: PositiveInt | None = None
    """`gpt`: width of the feed-forward layer. Empty: 4 x d_model."""
    dropout: Share = 0.0
    """`gpt`: dropout probability."""
    tie_embeddings: bool = True
    """`gpt`: use the token embedding as the output layer too."""
    vocab_size: PositiveInt | None = None
    """`gpt`: size of the vocabulary. Empty: the tokenizer's."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """`hf_causal_lm`: the model to fine-tune, a directory or a name on the hub. A directory needs no network."""
    revision: Annotated[str, Field(min_length=1)] | None = None
    """`hf_causal_lm`: branch, tag or commit of a model on the hub."""
    tokenizer_path: Annotated[str, Field(min_length=1)] | None = None
    """`hf_causal_lm`: where its tokenizer is. Empty: with the model."""
    local_files_only: bool = False
    """`hf_causal_lm`: never ask the hub; a name must be in its cache already. HF_HUB_OFFLINE=1 does the same."""
    trust_remote_code: bool = False
    """`hf_causal_lm`: run Python code that comes with the model. A model on the hub then needs a commit as revision."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """`hf_causal_lm`: how the weights are kept. With LoRA bfloat16 halves the memory of the base (adapters stay
    float32); trained weights themselves are better kept in float32."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"
    """`hf_causal_lm`: which implementation of attention transformers uses."""
    gradient_checkpointing: bool = False
    """`hf_causal_lm`: compute activations again in the backward pass: less memory, slower."""
    lora: LoraSection | None = None
    """`hf_causal_lm`: train low-rank adapters. Empty: all weights are trained. `{}` takes the defaults."""

    def problems(self) -> Iterator[Problem]:
        problem = registry.check_name("model.name", self.name, registry.MODELS)
        if problem:
            yield ("name",), problem
        if self.name == "hf_causal_lm" and not self.path:
            yield ("name", "path"), "model.path is empty. Name a model directory, or a model on the hub."
        if self.name != "hf_causal_lm":
            given = [name for name in ("path", "lora", "tokenizer_path") if getattr(self, name) is not None]
            if given:
                fields = " and ".join(f"model.{name}" for name in given)
                yield (
                    ("name", *given),
                    f"{fields} is for model.name hf_causal_lm, not {self.name}. Set model.name, or leave it out.",
                )
        if self.d_model % self.n_heads:
            fits = [h for h in range(1, self.d_model + 1) if self.d_model % h == 0 and h <= 4 * self.n_heads]
            yield (
                ("d_model", "n_heads"),
                f"model.d_model {self.d_model} is not divisible by model.n_heads {self.n_heads}. "
                f"Heads that fit: {', '.join(map(str, fits))}.",
            )


class DataSection(Section):
    """What it is trained on."""

    name: str = "python_stdlib"
    """A registered dataset: text (`python_stdlib`, `text_files`, `hf_text`, `dummy_text`), or rows with an answer each
    (`instruct_jsonl`, `chat_jsonl`)."""
    tokenizer: Annotated[str, Field(min_length=1)] | None = None
    """`byte`, `char` (every character of the text), `gpt2`, or a Hugging Face tokenizer directory
    (`llmtrain tokenizer train` makes one). Empty: the model's own for `hf_causal_lm`, else `byte`."""
    train_file: Annotated[str, Field(min_length=1)] | None = None
    """`instruct_jsonl`, `chat_jsonl`: training rows, one JSON object a line."""
    val_file: Annotated[str, Field(min_length=1)] | None = None
    """`instruct_jsonl`, `chat_jsonl`: validation rows. Empty: `val_fraction` of the training rows is held out."""
    prompt_format: Literal["auto", "chat", "plain"] = "auto"
    """`instruct_jsonl`: `chat` writes a row as a conversation with the tokenizer's own template, `plain` as headed
    paragraphs. `auto`: `chat` where the tokenizer has a template."""
    instruction_field: Annotated[str, Field(min_length=1)] = "instruction"
    """`instruct_jsonl`: field of a row that says what to do."""
    input_field: Annotated[str, Field(min_length=1)] = "input"
    """`instruct_jsonl`: field with the text to do it with; it may be missing or empty."""
    output_field: Annotated[str, Field(min_length=1)] = "output"
    """`instruct_jsonl`: field with the answer."""
    train_on_prompt: bool = False
    """Rows: let the prompt carry loss too, not only the answer."""
    packing: bool = True
    """Rows: put several short rows into one sequence of block_size, none of which sees another. Otherwise rows of
    similar length are batched together and padded."""
    add_special_tokens: bool = True
    """Rows in `plain` format: begin with the tokenizer's own special tokens (a chat template writes its own)."""
    long_rows: Literal["truncate", "skip", "error"] = "truncate"
    """Rows longer than block_size: cut at the end (and left out where nothing of the answer is left), left out, both
    counted, or an error that names the first."""
    bad_rows: Literal["error", "skip"] = "error"
    """Rows that cannot be used (not JSON, a key given twice, a field missing, no answer): an error that names the line,
    or left out and counted."""
    files: Files = []
    """Training files or globs, for `text_files` and for `hf_text` from local text, json or parquet. Text must be UTF-8
    without NUL characters; a byte order mark is left out."""
    val_files: Files = []
    """Validation files or globs. Empty: `val_fraction` of the training text is held out."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the text held out for validation where no validation text is named."""
    dataset_name: str | None = None
    """`hf_text` and rows: a dataset on the hub as owner/name, or a directory that the datasets library can load. A
    former name without an owner, such as wikitext, is looked up."""
    dataset_config: str | None = None
    """With dataset_name: the dataset's configuration, such as wikitext-2-raw-v1."""
    train_split: str = "train"
    """With dataset_name: the split to train on; slices such as `train[:90%]` work."""
    val_split: str | None = "validation"
    """With dataset_name: the split to validate on. Empty: `val_fraction` of the training rows is held out."""
    text_column: str = "text"
    """`hf_text`: the column that holds the text. Each row is a document; a row that ends with a line break is
    joined with the next one (WikiText is stored so)."""
    cache_dir: str = "~/.cache/llmtrain"
    """Where tokenised text is kept; it is reused while source and tokenizer are unchanged."""
    num_workers: CountOrZero = 0
    """Processes that prepare batches ahead of the trainer. 0: the trainer does it, which is fast enough
    unless the token store is on slow storage. They start as new processes that import the main module, so a script of
    your own that trains needs `if __name__ == "__main__":`."""

    def problems(self) -> Iterator[Problem]:
        problem = registry.check_name("data.name", self.name, registry.DATA)
        if problem:
            yield ("name",), problem
        if self.name in ("python_stdlib", "dummy_text") and (self.files or self.val_files):
            yield (
                ("name", "files", "val_files"),
                f"data.files is set, but data.name {self.name} reads no files. Set data.name to text_files or hf_text.",
            )
        is_rows = self.name in EXAMPLE_DATA
        if is_rows and not self.train_file and not self.dataset_name:
            yield (
                ("name", "train_file", "dataset_name"),
                "data.train_file is empty. Name a file of JSON lines, or a dataset of the hub in data.dataset_name.",
            )
        if is_rows and (self.files or self.val_files):
            yield ("name", "files", "val_files"), f"data.name {self.name} reads data.train_file, not data.files."
        if not is_rows and (self.train_file or self.val_file):
            yield (
                ("name", "train_file", "val_file"),
                f"data.train_file is for instruct_jsonl and chat_jsonl, not {self.name}. Set data.name, or data.files.",
            )
        if self.name == "text_files" and not self.files:
            yield ("name", "files"), "data.files is empty. Name at least one text file or glob."
        if self.name == "hf_text" and not self.files and not self.dataset_name:
            yield (
                ("name", "files", "dataset_name"),
                "data.dataset_name is empty. Name a dataset of the hub, or local files in data.files.",
            )


class TrainerSection(Section):
    """How it is trained. A step is one optimizer step."""

    max_steps: PositiveInt | None = None
    """Optimizer steps of the whole run. Empty: as many as max_epochs take, or 1000."""
    max_epochs: PositiveInt | None = None
    """Passes over the training data. The run ends with max_steps where that comes first. After each epoch the model is
    evaluated and saved."""
    early_stopping: PositiveInt | None = None
    """End the run when so many evaluations in a row brought no lower validation loss."""
    micro_batch_size: PositiveInt = 8
    """Sequences in one forward pass of one process."""
    grad_accum_steps: PositiveInt = 1
    """Micro-batches in a step, those of all processes together; at least as many as processes."""
    scale_batch: bool = False
    """Count `grad_accum_steps` for each process instead, as plain DDP scripts do: more processes, larger steps. The
    run is then another one on another number of processes."""
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    """`adamw`, or `adafactor` where optimizer memory is short."""
    lr: Positive = 3e-4
    """Peak learning rate."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end of the schedule."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape after the warm-up: `cosine` or `linear` fall to min_lr, `constant` stays, `wsd` stays and falls
    linearly in the last part (warm-up, stable, decay)."""
    schedule_steps: PositiveInt | None = None
    """Steps until the schedule reaches min_lr. Empty: max_steps. Set it where max_steps will be raised later."""
    warmup_steps: CountOrZero = 0
    """Steps over which the learning rate rises to lr."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """`wsd`: the share of the schedule spent falling."""
    weight_decay: NotNegative = 0.1
    """Applied to matrices, not to biases and norms."""
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.95)
    """AdamW's two averages."""
    max_grad_norm: Positive | None = 1.0
    """Gradients longer than this are scaled down. Empty: never."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`bf16`: forward and backward in bfloat16 autocast; weights and optimizer stay float32. A CPU without bfloat16
    instructions computes in float32."""
    compile: bool = False
    """Use torch.compile: slower start, faster steps on a GPU."""
    log_every_steps: PositiveInt = 10
    """Steps between two logged training losses."""
    eval_every_steps: PositiveInt | None = 200
    """Steps between two evaluations. Empty: only at the end."""
    eval_batches: PositiveInt | None = None
    """Validation micro-batches an evaluation reads, always the same ones. Empty: the whole split."""
    eval_prompts: Names = []
    """Prompts that the model answers at each evaluation; the answers are kept in the run's samples/."""
    eval_prompt_tokens: PositiveInt = 64
    """Longest such answer, in tokens."""
    save_every_steps: PositiveInt | None = 200
    """Steps between two checkpoints. Empty: only at the end and for a new best."""
    async_save: bool = False
    """Write checkpoints in the background, from a copy in memory: the loop waits for the copy only."""
    keep_checkpoints: TwoOrMoreOrAll = 3
    """Number of newest checkpoints to keep, at least two, or `all`. The best one is kept besides."""

    @property
    def steps(self) -> int:
        """max_steps with its default. Where max_epochs alone is given it is filled in once the data is known."""
        assert self.max_steps is not None or self.max_epochs is None
        return self.max_steps or DEFAULT_STEPS

    def problems(self) -> Iterator[Problem]:
        if self.min_lr > self.lr:
            yield ("lr", "min_lr"), f"trainer.min_lr {self.min_lr} is above trainer.lr {self.lr}."
        if self.max_steps is None and self.max_epochs is not None and self.schedule_steps is None:
            return  # the length of the schedule is known once the data is
        length = self.schedule_steps or self.steps
        if self.schedule != "constant" and self.warmup_steps >= length and length > 1:
            yield (
                ("max_steps", "schedule_steps", "warmup_steps", "schedule"),
                f"trainer.warmup_steps {self.warmup_steps} leaves nothing of the {length} steps of the schedule. "
                "Lower it, or raise trainer.max_steps.",
            )


class RendezvousSection(Section):
    """How the nodes of a run meet, in torchrun's words."""

    backend: Literal["static", "c10d", "etcd-v2"] | None = None
    """`static` (at node 0; a fixed number of nodes), `c10d` (at node 0; nodes may come and go) or `etcd-v2` (at an etcd
    server with the v2 API; extra `etcd`). Empty: static, or c10d where nodes may come and go."""
    endpoint: str | None = None
    """host:port of the etcd server. For static and c10d leave it empty: node 0 is the endpoint."""


class DistributedSection(Section):
    """Several processes. How many there are is said by whoever starts them (`train --processes`, `llmtrain node`,
    torchrun, a Kubernetes job); without any of these the process is alone."""

    strategy: Literal["none", "ddp", "fsdp"] = "ddp"
    """How processes share the work: `ddp` (each has the whole model), `fsdp` (each has a slice of it), or `none`
    (more than one process is refused). In a world of one process they are the same."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collective library; `auto` takes nccl on GPUs and gloo on CPUs."""
    init_method: Annotated[str, Field(pattern=r"^(env://|tcp://[^/:]+:[0-9]+)$")] | None = None
    """Where to meet, as torch.distributed writes it: env:// (the environment says it) or tcp://host:port."""
    timeout_sec: PositiveInt = 1800
    """Longest the others may keep a process waiting: in a collective, while one saves, compiles or hashes. Then the
    silent rank is named and the run ends with exit code 75."""
    join_timeout_sec: PositiveInt = 1800
    """Longest all processes may take to find each other. LLMTRAIN_DIST_TIMEOUT wins over it."""
    master_ready_timeout_sec: PositiveInt = 600
    """Longest to wait until the master's name resolves and its port answers. LLMTRAIN_MASTER_READY_TIMEOUT wins
    over it."""
    rendezvous: RendezvousSection = RendezvousSection()
    """How the nodes of `llmtrain node` and `llmtrain launch` meet. Options of `node` and torchrun's variables win over
    it; `train` does not use it."""
    reproducible_reduce: bool = False
    """`ddp`: sum gradients in one fixed order, so that 1, 2 and 4 processes end with the same bits. The number of
    processes must be a power of two; a few more copies of the gradients are kept."""
    find_unused_parameters: bool = False
    """`ddp`: let DDP look for parameters a step did not use."""
    rank: CountOrZero | None = None
    """Rank of this process, where the environment does not say."""
    world_size: PositiveInt | None = None
    """Number of processes, where the environment does not say."""
    local_rank: CountOrZero | None = None
    """Rank on this node, where the environment does not say."""
    master_addr: str | None = None
    """Address of rank 0, where the environment does not say."""
    master_port: Annotated[int, Field(gt=0, lt=65536)] | None = None
    """Port of rank 0, where the environment does not say."""

    def problems(self) -> Iterator[Problem]:
        if self.reproducible_reduce and self.strategy == "fsdp":
            yield (
                ("strategy", "reproducible_reduce"),
                "distributed.reproducible_reduce goes with strategy ddp or none, not with fsdp: sharded gradients are "
                "summed by the collective library.",
            )
        backend, endpoint = self.rendezvous.backend, self.rendezvous.endpoint
        if backend == "etcd-v2" and endpoint is None:
            yield (
                ("rendezvous",),
                "distributed.rendezvous.backend etcd-v2 needs distributed.rendezvous.endpoint. Set it to host:port of "
                "the etcd server.",
            )
        if endpoint is not None and backend is None:
            yield (
                ("rendezvous",),
                "distributed.rendezvous.endpoint is set, but distributed.rendezvous.backend is empty. Set it to "
                "etcd-v2, or leave both out.",
            )
        if endpoint is not None and not is_host_port(endpoint):
            yield (
                ("rendezvous",),
                f"distributed.rendezvous.endpoint must be host:port, such as etcd.default:2379, without http://, got "
                f"{endpoint!r}.",
            )
        if self.rank is not None and self.rank >= (self.world_size or 1):
            yield (
                ("rank", "world_size"),
                f"distributed.rank {self.rank} is not below distributed.world_size {self.world_size or 1}.",
            )


class MlflowSection(Section):
    """Tracking with MLflow (extra `mlflow`)."""

    enabled: bool = False
    """Send parameters, metrics, config and metadata to MLflow."""
    tracking_uri: str | None = None
    """Server, sqlite URI or directory. Empty: MLFLOW_TRACKING_URI, else a sqlite file in output.root_dir. A directory
    gets MLflow's file store where MLflow opens one (before 3.13, or with MLFLOW_ALLOW_FILE_STORE=true), else a sqlite
    file, mlflow.db; the log and the result name the URI that opens it."""
    experiment: Annotated[str, Field(min_length=1)] = "llmtrain"
    """Experiment name."""
    run_name: str | None = None
    """Name of the MLflow run. Empty: the run id."""
    log_models: bool = False
    """Upload the best checkpoint at the end."""


class LoggingSection(Section):
    """Log lines (standard error) and the log file."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe line shown."""
    json_output: bool = False
    """Log lines as JSON objects, one a line."""
    log_to_file: bool = True
    """Keep the lines in the run directory's logs/ too."""
    file_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "train.log"
    """Name of that file."""
    all_ranks: bool = False
    """Show the log lines of every rank. false: rank 0's, and warnings of all; each rank has a log file in any case."""
    tensorboard: bool = False
    """Write TensorBoard event files to the run directory (extra `tensorboard`)."""


class OutputSection(Section):
    """Where the run is kept."""

    root_dir: Annotated[str, Field(min_length=1)] = "runs"
    """Directory of all runs."""
    run_id: Annotated[str, Field(pattern=RUN_ID_PATTERN)] | None = None
    """Name of the run's directory: lower-case letters, digits and hyphens, 2 to 40 characters.
    Empty: made from run.name and the time."""
    layout: Literal["steps", "epochs"] = "steps"
    """`epochs`: besides checkpoints/, lay out epoch-N/rank-K/ after each epoch, and best/. They are hard links; each
    keeps its checkpoint's space when keep_checkpoints removes the original."""
    sync_uri: Annotated[str, Field(min_length=1)] | None = None
    """Copy the run directory to s3://bucket/prefix/<run id> once the run is finished, as `llmtrain sync` does (extra
    `s3`). Credentials and endpoint come from boto3's own places, never from the URI."""
    save_config_copy: bool = True
    """Write the resolved config to config.yaml."""
    save_meta_json: bool = True
    """Write meta.json: versions, machine, git commit, command line."""

    def problems(self) -> Iterator[Problem]:
        if self.sync_uri and not re.fullmatch(S3_URI_PATTERN, self.sync_uri):
            # The value is not shown: it may hold a key.
            yield (
                ("sync_uri",),
                "output.sync_uri is not of the form s3://bucket/prefix. Write that, without credentials: boto3 finds "
                "them, as in AWS_PROFILE or AWS_ACCESS_KEY_ID.",
            )


class Config(Section):
    """A whole config document."""

    schema_version: Literal[2] = 2
    """Version of this schema. A version-1 document is upgraded when it is loaded."""
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    trainer: TrainerSection = TrainerSection()
    distributed: DistributedSection = DistributedSection()
    mlflow: MlflowSection = MlflowSection()
    logging: LoggingSection = LoggingSection()
    output: OutputSection = OutputSection()
    launch: LaunchSection = LaunchSection()

    def problems(self) -> Iterator[Problem]:
        least = VOCABULARIES.get(self.data.tokenizer or ("" if self.model.name == "hf_causal_lm" else "byte"), 0)
        if self.model.vocab_size is not None and self.model.vocab_size < least:
            yield (
                ("model", "data"),
                f"model.vocab_size {self.model.vocab_size} is smaller than the tokenizer's vocabulary of {least}. "
                "Leave model.vocab_size empty to take the tokenizer's.",
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; loading them gives this config again."""
        return self.model_dump(mode="json")

    def with_values(self, section: str, **values: object) -> "Config":
        """A copy with some fields of one section replaced."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


def subsection(kind: type[Section], field: str) -> type[Section] | None:
    """The section inside a section that a field holds, such as model.lora; None for any other field."""
    info = kind.model_fields.get(field)
    parts = (info.annotation, *get_args(info.annotation)) if info else ()
    return next((part for part in parts if isinstance(part, type) and issubclass(part, Section)), None)


def takes_any_name(kind: type[Section], field: str) -> bool:
    """Whether a field maps names of the user's own to values, such as launch.env."""
    info = kind.model_fields.get(field)
    return info is not None and get_origin(info.annotation) is dict


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Fields of two resolved configs that differ: (path, old, new)."""
    found = []
    for section in sorted({*old, *new} - {"schema_version"}):
        before, after = (values.get(section) for values in (old, new))
        if not isinstance(before, dict) or not isinstance(after, dict):
            found.append((section, before, after))
            continue
        for field in sorted({*before, *after}):
            if before.get(field) != after.get(field):
                found.append((f"{section}.{field}", before.get(field), after.get(field)))
    return found


def may_change(path: str) -> bool:
    """Whether a field may differ between a run and its resumption."""
    return path in RESUME_MAY_CHANGE or f"{path.split('.')[0]}.*" in RESUME_MAY_CHANGE
