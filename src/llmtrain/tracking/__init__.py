"""Trackers: where the metrics of a run go (files, console, MLflow, W&B, TensorBoard, Prometheus).

base.py has the interface, open.py opens what the config enables. jsonl.py is the run's own record, from which replay.py
fills MLflow later (a run without network); console.py shows it. mlflow.py, wandb.py and tensorboard.py send it to
services, in the thread of background.py; prometheus.py and train_job.py are read by a cluster.

To add one: a module with a subclass of Tracker and a function check_installed, a row in registry.TRACKERS, a field in
config/tracking.py and its name in open.enabled_trackers; for a remote service also launch/egress.py, which lists the
servers that pods must reach. Trackers of users are named in tracking.custom instead (docs/extending.md).
"""
