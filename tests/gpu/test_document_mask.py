"""data.document_mask on a GPU: attention of a window by flex_attention, which skips other documents."""

from pathlib import Path
from typing import Any

import pytest
from gpu_run import Train

BLOCK = 256
END = 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    pytest.importorskip("transformers")
    from tiny_llama import make_model

    return make_model(tmp_path / "model", hidden_size=128, intermediate_size=256, max_position_embeddings=512)


def windows() -> Any:
    """Two windows with documents of several lengths; one border is the end of a block of the kernel (128)."""
    import numpy as np

    from llmtrain.data.text.window_batches import window_batch

    ids = np.random.default_rng(1).integers(1, 250, (2, BLOCK + 1))
    ids[0, [4, 60, 127, 200]] = END
    ids[1, [130, 131]] = END
    return window_batch(ids, 0, END)


def test_a_document_has_the_logits_that_it_has_alone(model: Path) -> None:
    import torch

    from llmtrain.config.model import HfCausalLmSection
    from llmtrain.models.base import evaluating
    from llmtrain.models.hf.attention import without_flex
    from llmtrain.models.hf.causal_lm import HFCausalLMAdapter

    device = torch.device("cuda")
    adapter = HFCausalLMAdapter(HfCausalLmSection(path=str(model), block_size=BLOCK), 250)
    adapter.prepare_for(device, is_packed=True)
    assert adapter.attention == "flex_attention"
    module: Any = adapter.build().to(device)
    batch = windows().to(device)
    with torch.no_grad(), evaluating(module):
        masked = module(batch.inputs, positions=batch.positions)
        with without_flex(module.base.config):
            whole = module(batch.inputs)
            for row in range(2):
                starts = torch.nonzero(batch.positions[row] == 0).flatten().tolist()
                assert len(starts) == (5, 3)[row]
                for start, end in zip(starts, [*starts[1:], BLOCK], strict=True):
                    alone = module(batch.inputs[row : row + 1, start:end])[0]
                    distance = (masked[row, start:end] - alone).abs().max()
                    assert distance < 0.02 * alone.abs().max()  # kernels may round to TF32
                    if start:
                        leak = (whole[row, start:end] - alone).abs().max()
                        assert distance < 0.1 * leak


def test_compiled_run_learns(train: Train, model: Path, tmp_path: Path) -> None:
    from tiny_llama import WORDS

    files = []
    for number in range(200):
        words = [WORDS[(3 * number + place) % len(WORDS)] for place in range(5 + number % 90)]
        files.append(tmp_path / f"{number:03}.txt")
        files[-1].write_text(" ".join(words))
    sets = (
        "model.name=hf_causal_lm",
        f"model.path={model}",
        f"model.block_size={BLOCK}",
        "data.name=text_files",
        f"data.files=[{tmp_path}/*.txt]",
        "data.tokenizer=",
        "trainer.compile=true",
    )
    masked = train(*sets, "data.document_mask=true", folder="masked").json
    assert masked["final_train_loss"] < 0.9 * masked["first_train_loss"]
    short = (*sets, "trainer.compile=false", "trainer.max_steps=2", "trainer.warmup_steps=1")
    eager = train(*short, "data.document_mask=true", folder="eager").json
    assert masked["first_train_loss"] == pytest.approx(eager["first_train_loss"], rel=1e-2)
    plain = train(*short, folder="plain").json
    assert plain["first_train_loss"] != pytest.approx(eager["first_train_loss"], rel=1e-3)
