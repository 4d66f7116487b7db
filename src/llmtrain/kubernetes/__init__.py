"""Requests to the Kubernetes API: the only package that imports the Kubernetes client.

Start with client.py (Cluster: every request), then api_errors.py (refusals as errors with a remedy), kubeconfig.py
(which cluster), exec.py (commands in pods), labels.py (labels and annotations that llmtrain writes), and
server_clock.py (ages by the clock of the API server).
"""
