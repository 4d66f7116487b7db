"""The Hugging Face hub: finding, downloading and uploading models and datasets.

Imports neither torch nor transformers. Start with find.py (where is the model that a config names) and download.py
(into a directory once, also if several processes request it). model_names.py and dataset_names.py parse names, needs.py
lists what a config needs, task_index.py and tasks.py have the stock tasks of lm_eval and their data, token.py finds the
token, upload.py pushes an export, errors.py words what the hub answers.
"""
