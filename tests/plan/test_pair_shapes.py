"""Shapes of micro-batches of preference pairs, alone or of a mixture."""

from typing import Any

import pytest

from llmtrain.config.document import Document
from llmtrain.config.load import build_config
from llmtrain.config.mixture import is_packed
from llmtrain.plan.pair_shapes import with_pair_shapes


@pytest.mark.parametrize("packing", [True, False])
def test_a_mixture_of_pairs_has_the_shapes_of_one_source(packing: bool) -> None:
    source: dict[str, Any] = {"name": "preference_jsonl", "train_file": "a.jsonl", "packing": packing}
    mixture = {"name": "mixture", "sources": [{**source, "weight": 2}, {**source, "weight": 1}]}
    found = []
    for data in (source, mixture):
        values = {
            "schema_version": 3,
            "model": {"name": "hf_causal_lm", "path": "owner/model", "block_size": 64},
            "data": data,
            "trainer": {"micro_batch_size": 3, "objective": {"name": "dpo"}},
        }
        config = with_pair_shapes(build_config(Document("test", values)))
        found.append((config.model.block_size, config.trainer.micro_batch_size, is_packed(config.data)))
    assert found[0] == found[1] == ((128, 3, True) if packing else (64, 6, False))
