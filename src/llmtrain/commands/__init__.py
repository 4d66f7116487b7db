"""The command line, one verb per file: `llmtrain fetch-model` is fetch_model.py.

A command parses arguments, calls one function of another package and prints the result, as text or as one JSON object.
table.py lists the commands for --help; cli.py (one level up) turns errors into exit codes. options.py and
cluster_options.py have the options that several commands share, run_tables.py, cost_tables.py and loss_plot.py (curves
in the terminal) what several print, spinner.py and stream.py what they print while they work. The columns of
`runs list` are in run_tables.py, their values (also for --json and --sort) in runs/listing.py. Imports of torch and of
the Kubernetes client stay inside the functions, so that --help is fast.
"""
