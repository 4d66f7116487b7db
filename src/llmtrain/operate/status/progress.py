"""Progress of a run, read from the log of rank 0."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from llmtrain.compat.log_lines import idle_code
from llmtrain.runs.progress_lines import ProgressLine, read_progress_line


@dataclass(frozen=True)
class RunProgress:
    step: int | None = None
    max_steps: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    tokens_per_second: float | None = None
    time_left: str | None = None
    seconds_left: float | None = None
    peak_memory_bytes: float | None = None
    """Of rank 0's GPU."""
    has_stepped: bool = False
    """Whether a step was logged since the start: a resumed run logs its step number before its first step."""
    is_done: bool = False
    """Whether it logged that the run is finished."""
    idle_code: int | None = None
    """Exit code logged by a StatefulSet pod that waits to be deleted."""

    def after(self, line: str) -> "RunProgress":
        """The progress after one more line. Values that the line does not have stay, except the speed."""
        read = read_progress_line(line)
        if read is not None:
            return self._after(read)
        code = idle_code(line)
        return self if code is None else replace(self, idle_code=code, time_left=None, seconds_left=None)

    def _after(self, line: ProgressLine) -> "RunProgress":
        if line.event == "done":
            return replace(self, step=line.step, time_left=None, seconds_left=None, is_done=True)
        if line.event == "resumed":
            return replace(
                self, step=line.step, has_stepped=False, tokens_per_second=None, time_left=None, seconds_left=None
            )
        progress = replace(self, step=line.step, max_steps=line.max_steps, has_stepped=True)
        if line.val_loss is not None:
            progress = replace(progress, val_loss=line.val_loss)
        if line.loss is not None:
            progress = replace(progress, loss=line.loss)
        if line.event == "step":
            progress = replace(
                progress,
                tokens_per_second=line.tokens_per_second,
                time_left=line.time_left,
                seconds_left=line.seconds_left,
                peak_memory_bytes=line.peak_memory_bytes or self.peak_memory_bytes,
            )
        return progress


def read_progress(lines: Iterable[str]) -> RunProgress:
    progress = RunProgress()
    for line in lines:
        progress = progress.after(line)
    return progress
