"""llmtrain cluster: a local Kubernetes cluster with kind (the tool), for trying things out and for tests.

Start with kind_cluster.py: `up`, `down` and `load_image`, and how a cluster is known to be ours. kind_cli.py runs kind
and its container provider. operators.py installs the operators that some kinds of `launch.kind` need.
"""
