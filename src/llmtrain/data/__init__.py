"""Data: from files or datasets to batches of token ids.

Start with base.py: what a dataset implements, and what the trainer gets. text/, examples/ and preferences/ are the
datasets of llmtrain (running text; instructions and chats; pairs of answers), records/ reads their files, tokenizers/
turns text into ids, store/ keeps the ids on disk, mixture/ draws from several sources (schedule.py: which source a
sample is from). Then batches.py (what a batch is), make_batches.py (which batches a config has) and sampler.py (which
window of text comes when).
"""
