"""Running text: a sample is any window of it.

Start with text_files.py (`text_files`) or hf_text.py (`hf_text`); python_stdlib.py and dummy_text.py need no files.
reader.py reads files of any size, documents.py the documents in records, window_batches.py cuts windows into batches.
"""
