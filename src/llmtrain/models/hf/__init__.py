"""`hf_causal_lm`: a model of transformers, fine-tuned fully or with LoRA.

Start with causal_lm.py: the module and its adapter. files.py reads a model directory and refuses what does not fit,
attention.py chooses the attention kernel and the mask of packed examples, lora.py adds, saves and loads adapters,
lora_groups.py computes those with a common input together, kv_cache.py is the cache for generation and for texts that
begin alike, probes.py finds out by a forward pass what the code does not say.
"""
