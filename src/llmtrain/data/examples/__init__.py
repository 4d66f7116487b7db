"""Examples with an answer: instructions and conversations.

Start with json_examples.py, the base of instruct_jsonl.py and chat_jsonl.py. formats.py recognizes the formats of other
tools, prompts.py writes an example as text, selection.py truncates or drops long ones, example_batches.py packs or pads
them, masks what is not trained on, and decides their order.
"""
