"""`push` and `exec`: files into the pods of a run, and commands in all of them at once. See run_in_pods.py."""
