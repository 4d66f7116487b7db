"""The logs of all pods of a run in one stream.

Start with merged_logs.py; pod_log.py follows one pod across restarts and broken connections.
"""
