"""Sweeps: many trials of one config, stopped early and promoted exactly, on any number of workers.

A promoted trial is resumed, and a resumed run ends in the same bits as one that was never stopped, so the table of a
sweep does not depend on workers, times or interruptions. The driver needs no torch.

In reading order: spec.py (what is asked for), space.py (the grammar of values), search.py and optuna_search.py (which
values each trial has), halving.py (rungs and promotion), trials.py and prepare.py (configs, checked before the first
trial), record.py (all files of a sweep), jobs.py (what to train next: a function of the outcomes), driver.py (the loop)
with workers.py, local.py and cluster.py (where runs are trained), outcome.py (how one ended), table.py and show.py (the
result), price.py (what a sweep costs, before it starts), python_api.py (llmtrain.run_sweep).
"""
