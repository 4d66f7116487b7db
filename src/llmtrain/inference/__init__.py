"""Use of a trained model: generate, evaluate, export.

Start with loaded_model.py (`llmtrain.Model`, the API). load.py finds a run, an adapter or a model directory and builds
a `LoadedModel` from it; generate.py, evaluate.py, tasks.py and export.py each do one thing with that. export_check/
proves an export by loading it, gguf/ writes one for llama.cpp, export_list.py says what a model can become. What an
export of `gpt` looks like for transformers and vLLM: models/gpt/gpt2_format.py and models/gpt/modern_formats.py.

Elsewhere, because training uses them too: scores in training/tasks/, sampling in training/text_generation.py, the
key-value cache in models/gpt/kv_cache.py, precision in models/device_precision.py.
"""
