"""Seeds derived from the seed of the run: every random choice depends on the seed and on its position only."""

import hashlib


def derive_seed(seed: int, *parts: int | str) -> int:
    """A 63-bit seed that depends on all parts and is the same on every machine and library version."""
    digest = hashlib.sha256("/".join(map(str, (seed, *parts))).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
