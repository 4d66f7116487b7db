"""Recognizes the errors of torch that mean too little memory, on a GPU or on a CPU."""

import re

import torch

_CPU = re.compile(r"DefaultCPUAllocator: (.*?you tried to allocate \d+ bytes)")


def out_of_memory(problem: RuntimeError) -> str | None:
    """What torch says about the memory; None for any other error."""
    if isinstance(problem, torch.OutOfMemoryError):
        return str(problem).partition(". Of the")[0]
    found = _CPU.search(str(problem))
    return found.group(1) if found else None
