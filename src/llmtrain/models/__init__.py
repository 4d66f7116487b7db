"""Models: what the trainer needs from one, and the models that llmtrain has.

Start with base.py: ModelAdapter, of which a model implements one method. gpt/ are models trained from scratch (with the
key-value cache for generation, gpt/kv_cache.py), hf/ those of Hugging Face (with LoRA, hf/lora.py), dummy_gpt.py is the
smallest example of an adapter. losses.py computes the loss of a large vocabulary in chunks (loss_kernel.py on a GPU;
preference losses: training/objectives/); sizes.py has the sizes of chunks and vocabularies.
Precision: compute_dtype.py (bfloat16 with float32 weights), device_precision.py. activation_checkpointing.py trades
time for memory.
"""
