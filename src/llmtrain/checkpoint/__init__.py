"""Checkpoints: what a run needs to continue exactly, on any number of processes.

Start with store.py: all checkpoints of a run, and how one is written so that it exists completely or not at all. Then
checkpoint.py (one checkpoint, read without pickle; runs/checksums.py, which needs no torch, finds and names what is
damaged), shards.py (which rank writes and reads which part of a tensor), state.py (the tensors and counters of a run,
and their hash), saver.py (when and in which thread the loop saves), replace.py (a directory replaced by another).
artifacts.py and model_card.py write the directories that people use: the best adapter, one per epoch.
"""
