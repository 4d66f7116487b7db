"""Preflight checks for your own scripts: `from llmtrain.diagnose import validate_environment, setup_network, diagnose`.

`require_environment` raises an error where `validate_environment` returns problems. Only `diagnose` imports torch, when
it is called.
"""

from llmtrain.distributed.network import setup_network
from llmtrain.distributed.process_info import require_environment, validate_environment
from llmtrain.doctor.local import diagnose
from llmtrain.findings import Finding

__all__ = ["Finding", "diagnose", "require_environment", "setup_network", "validate_environment"]
