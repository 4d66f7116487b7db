"""The `output` section: where a run is stored."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from llmtrain.config.section import PATH_PATTERN, RUN_ID_PATTERN, Problem, Section, Text

S3_URI_PATTERN = r"s3://(?P<bucket>[A-Za-z0-9._-]{1,255})(?:/(?P<prefix>[^\s?#@]*))?"
DEFAULT_MOUNT_PATH = "/out"


class OutputSection(Section):
    """Where the run is stored."""

    root_dir: Annotated[Text, Field(pattern=PATH_PATTERN)] = "runs"
    """Directory of all runs. On a cluster the runs volume is mounted there; a relative path means /out."""
    run_id: Annotated[str, Field(pattern=RUN_ID_PATTERN)] | None = None
    """Name of the run directory and of the Kubernetes job: 2 to 40 lowercase letters, digits and hyphens. null derives
    it from run.name and the time."""
    layout: Literal["steps", "epochs"] = "steps"
    """`epochs` adds epoch-N/rank-K/ after each epoch, and best/, as hard links beside checkpoints/. Each keeps its
    checkpoint on disk after keep_checkpoints removes the original."""
    sync_uri: Text | None = None
    """Copy the finished run directory to s3://bucket/prefix/<run id>, as `llmtrain sync` does (extra `s3`). Credentials
    come from boto3's usual sources, never from the URI."""
    report: bool = True
    """Write report.html when the run has finished: its curves and facts as one file for a browser."""
    save_config_copy: bool = True
    """Write the resolved config to config.yaml."""
    save_meta_json: bool = True
    """Write meta.json: versions, machine, git commit, command line."""

    @property
    def mount_path(self) -> str:
        """Where pods mount the runs volume."""
        if not self.root_dir.startswith("/"):
            return DEFAULT_MOUNT_PATH
        return self.root_dir.rstrip("/")

    def problems(self) -> Iterator[Problem]:
        if self.sync_uri and not re.fullmatch(S3_URI_PATTERN, self.sync_uri):
            # The value is not shown: it may contain a key.
            yield (
                ("sync_uri",),
                "output.sync_uri must be s3://bucket/prefix without credentials. boto3 takes them from AWS_PROFILE, "
                "AWS_ACCESS_KEY_ID and its other usual sources.",
            )
