"""llmtrain why: one cause of a run's state, its evidence and a remedy.

Start with explain.py. snapshot.py reads the cluster once, and causes only look at that snapshot. causes.py is the table
of all causes, the most certain first; each causes_*.py is one group of them. A new cause is one function and one row.
run_reports.py and stall.py read files of the run directory, through a pod.
"""
