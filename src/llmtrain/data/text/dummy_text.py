"""`dummy_text`: random sentences for smoke tests; a model learns them within a few steps."""

import random
from collections.abc import Iterator
from typing import Any

from llmtrain.data.base import TextData
from llmtrain.data.text_and_examples import Split, TextChunk

_SENTENCES = {"train": 4000, "val": 400}
_SUBJECTS = ("the pod", "a node", "one rank", "the trainer", "my cluster", "every step")
_VERBS = ("waits for", "resumes", "checks", "restarts", "counts", "forgives")
_OBJECTS = ("the master", "a checkpoint", "its peers", "the loss", "two tokens", "a late packet")


class DummyText(TextData):
    def identity(self) -> dict[str, Any]:
        return {"kind": "dummy_text", "seed": self.seed, "sentences": _SENTENCES}

    def chunks(self, split: Split) -> Iterator[TextChunk]:
        rng = random.Random(f"{self.seed}:{split}")
        for _ in range(_SENTENCES[split] // 100):
            words = (f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_OBJECTS)}.\n" for _ in range(100))
            yield TextChunk("".join(words), ends_document=True)
