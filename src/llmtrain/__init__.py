"""llmtrain: trains GPTs and fine-tunes Hugging Face models from one typed config."""

__version__ = "0.1.0"
