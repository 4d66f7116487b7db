"""The rules, by topic; lint/check_manifests.py collects them."""
