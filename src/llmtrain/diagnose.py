"""Public API of the preflight checks: `from llmtrain.diagnose import validate_environment, setup_network, diagnose`.

For scripts of users; the checks themselves are in doctor/diagnose.py. (Why a run failed: `llmtrain why`, operate/why.)
`require_environment` raises InvalidEnvironment, a RuntimeError, where `validate_environment` returns problems. Only
`diagnose` imports torch, when it is called.
"""

from llmtrain.core.findings import Finding
from llmtrain.distributed.network import setup_network
from llmtrain.distributed.process_info import InvalidEnvironment, require_environment, validate_environment
from llmtrain.doctor.diagnose import diagnose

__all__ = [
    "Finding",
    "InvalidEnvironment",
    "diagnose",
    "require_environment",
    "setup_network",
    "validate_environment",
]
