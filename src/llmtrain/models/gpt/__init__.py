"""`gpt`: two architectures, trained from scratch. Parallelism is applied from outside.

Start with model.py (GPT-2, and what both architectures share), then modern.py (rotary positions, RMSNorm, ReLU^2 or
SwiGLU) and kv_cache.py (attention, with a cache for generation). adapter.py is what the trainer sees. gpt2_format.py
and modern_formats.py write and read the formats of transformers, on top of format_files.py.
"""
