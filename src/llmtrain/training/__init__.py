"""Trains a config to its end, in one process or as one rank of several.

Start with run.py, which assembles a run in the order in which it happens: components.py (data and model), ownership.py
(run directory, lock, generation), resume.py and origin.py (where it starts: a checkpoint, or `--from` another run),
model_handle.py, and optimizer.py (muon.py and newton_schulz.py are ours). Then loop.py, step.py, schedule.py and
evaluate.py: what a run does in every step. What it minimizes: objectives/ (next token, DPO and others). How many
micro-batches a step has: distributed/batch_split.py.

How it ends: result.py; shutdown.py (SIGTERM and Ctrl-C), resume_hint.py (what it then tells the user), watchdog.py
(heartbeats, ranks that hang), memory_errors.py and storage_errors.py. predicted.py records what it is predicted to
need. Text: eval_prompts.py, on top of text_generation.py. Scores: eval_tasks.py, on top of tasks/. dry_run.py and
smoke.py are the two commands that train without a run; requirements.py is what a run needs on this machine, and
torch_settings.py what it sets in torch.
"""
