"""The `run` section: name, seed and device."""

from typing import Annotated, Literal

from pydantic import Field

from llmtrain.config.section import MayChange, Section

MAX_THREADS = 1024


class RunSection(Section):
    """Run name, seed and device."""

    name: MayChange[Annotated[str, Field(min_length=1, max_length=200)]] = "llmtrain"
    """Human-readable name; the run id is derived from it."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1337
    """Seed for initial weights, sample order and dropout."""
    device: MayChange[Literal["auto", "cpu", "cuda"]] = "auto"
    """Device to train on. `auto` uses a GPU if there is one."""
    deterministic: bool = False
    """Use deterministic kernels only. CPU runs are bit-exact without it; on a GPU it costs some speed."""
    threads: MayChange[Annotated[int, Field(gt=0, le=MAX_THREADS)] | None] = None
    """CPU threads per process. null uses OMP_NUM_THREADS, else the number of cores divided by the processes; the number
    is recorded at the first start and reused on resume, because floating-point sums depend on it."""
    notes: MayChange[str | None] = None
    """Free text, stored with the run."""
