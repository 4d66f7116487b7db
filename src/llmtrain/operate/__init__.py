"""Runs on a cluster after their launch: status, logs, download, diagnosis, recovery, commands in pods.

Start with observed_run.py (a run as it is at one moment; everything else reads it) and cluster_run.py (ClusterRun, the
handle that commands and the Python API use). Then
status/  state of runs and pods, and watching them: state.py decides
why/     `llmtrain why`: causes.py lists the causes; exit codes and OOMKilled are in causes_exit.py
logs/    merged_logs.py: the logs of all pods in one stream
fetch/   fetch_run.py: downloading through a reader pod
exec/    run_in_pods.py: `push` and `exec`
start.py launches again, recover.py replaces pods, token_secret.py creates the Secret of a Hugging Face token. probe.py
is `plan --probe` in a pod.
"""
