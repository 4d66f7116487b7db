"""Scores of a model on tasks: multiple choice, likely words, short answers.

Start with task_set.py: from the names of `--tasks` or trainer.eval_tasks to tasks, and from those to scores (score.py).
own_tasks.py has tasks in JSONL files (item_kinds.py), of which bundled/ holds some; stock_tasks.py those of lm_eval.
Both use task_model.py, the model in memory with its tokenizer: likelihoods.py computes log-likelihoods of given tokens,
answers.py generates text. compare.py compares two models on the same items. Where the data of stock tasks lies and how
it is downloaded: hub/tasks.py.
"""
