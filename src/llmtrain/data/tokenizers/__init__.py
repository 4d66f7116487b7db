"""Tokenizers: text to token ids and back.

Start with base.py (what every tokenizer has) and load.py (from data.tokenizer to a tokenizer). byte.py, char.py,
gpt2.py and hf.py are the kinds; bpe.py trains one; byte_level.py is the alphabet of byte-level BPE; split.py cuts long
text without changing its ids; chat_template.py calls the template of a model (the conversation itself:
data/examples/prompts.py); keep_ids.py is for exports of models of transformers.
"""
