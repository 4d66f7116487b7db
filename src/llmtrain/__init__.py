"""llmtrain: one typed config trains a GPT, and every step of it can be trusted."""

__version__ = "0.1.0"
