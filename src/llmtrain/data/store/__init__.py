"""Tokenized data on disk, built once and memory-mapped.

Start with directory.py: where a store lies, how it is built, locked and verified. token_store.py holds running text,
example_store.py examples with their answers marked.
"""
