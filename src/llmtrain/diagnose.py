"""The preflight: what is right and wrong with a machine, an environment and a network, before anything is trained.

For one's own script: `from llmtrain.diagnose import validate_environment, setup_network, diagnose`, and
`require_environment`, which raises where `validate_environment` returns problems. None of them needs torch to be
imported; `diagnose` imports it when it is called.
"""

from llmtrain.distributed.network import setup_network
from llmtrain.distributed.process_info import require_environment, validate_environment
from llmtrain.doctor.local import diagnose
from llmtrain.findings import Finding

__all__ = ["Finding", "diagnose", "require_environment", "setup_network", "validate_environment"]
