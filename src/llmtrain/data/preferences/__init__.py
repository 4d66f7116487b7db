"""Preference pairs: a prompt with a chosen and a rejected answer.

Start with preference_jsonl.py, the dataset. pair_records.py recognizes the spellings of other tools, pair_store.py
tokenizes prompt and answer together and keeps them on disk, pair_batches.py packs or pads pairs and decides their
order.
"""
