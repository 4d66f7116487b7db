"""PyYAML's loader and dumper in C, five to ten times as fast; those in Python where it was built without them."""

from typing import Any

import yaml

Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
