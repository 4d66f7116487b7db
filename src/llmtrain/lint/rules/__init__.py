"""The known traps of training manifests, by topic; diagnose/manifests.py puts them together."""
