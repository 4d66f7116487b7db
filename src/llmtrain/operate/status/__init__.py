"""What a run does now.

Start with state.py, which decides the state and its reason (the names are in runs/state.py). Its input: pods.py reads
the pods, progress.py the log of rank 0, queue.py and events.py the rest. run_status.py makes a RunStatus of it, with
the GPU-hours and cost of run_cost.py;
all_runs.py does so for all runs of a namespace, watch.py until a run ends. Its text: view.py (a run, and why a pod does
not run), tables.py (the runs of a namespace), display.py (live, in a terminal).
"""
