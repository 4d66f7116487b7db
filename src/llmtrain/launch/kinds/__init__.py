"""One module per launch.kind; base.py has the questions that a kind answers, and their defaults.

Start with base.py and indexed_job.py, the default; job_set.py and train_job.py build on it. A new kind is one module
here and one row in registry.KINDS: docs/extending.md shows one.
"""
