"""Proof of an export: a new process loads it, and must compute what the model computes.

Start with expected.py, which asks the model in memory for token ids, logits and a greedy continuation. check.py runs
load_export.py, which asks transformers, peft and llama.cpp for the same without importing llmtrain, and compares.
"""
