"""The rules, one function each, with severity, reason and remedy beside it. Start with rule.py.

pods.py has volumes, shared memory, signals and secrets too; jobs.py restarts and counts of every kind of job. A new
rule is one decorated function and one entry in RULES of its file; docs/lint.md lists all of them.
"""
