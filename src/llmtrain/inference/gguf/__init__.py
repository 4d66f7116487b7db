"""GGUF, the format of llama.cpp, Ollama and LM Studio, written from an export for transformers.

Start with write.py. shapes.py has the architectures and what differs in their weights, vocabulary.py the tokenizers:
what llama.cpp cannot read exactly is refused there, with a reason.
"""
