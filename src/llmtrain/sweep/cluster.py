"""Trials as runs on a Kubernetes cluster."""
