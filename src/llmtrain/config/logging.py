"""The `logging` section: log lines and the log file."""

from typing import Annotated, Literal

from pydantic import Field

from llmtrain.config.section import Section


class LoggingSection(Section):
    """Log lines (standard error) and the log file."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Minimum severity of log lines."""
    json_output: bool = False
    """Log one JSON object per line."""
    log_to_file: bool = True
    """Also write log lines to logs/ in the run directory."""
    file_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "train.log"
    """Name of the log file."""
    all_ranks: bool = False
    """Show log lines of all ranks. false shows rank 0, and warnings of all; every rank has a log file in any case."""
