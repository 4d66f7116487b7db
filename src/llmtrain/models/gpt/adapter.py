"""`gpt`: builds, counts and exports a GPT for the trainer."""

from pathlib import Path

from torch import nn

from llmtrain.config.model import GptSection
from llmtrain.errors import DataError
from llmtrain.models.base import ModelAdapter, parameter_count
from llmtrain.models.gpt.gpt2_format import read_gpt2, write_gpt2
from llmtrain.models.gpt.model import GPT
from llmtrain.text import one_line


class GPTAdapter(ModelAdapter):
    config: GptSection

    def build(self) -> nn.Module:
        module = GPT(self.config, self.vocab_size)
        if self.config.init != "random":
            state = read_gpt2(Path(self.config.init).expanduser(), self.config, self.vocab_size)
            try:
                module.load_state_dict(state)
            except RuntimeError as problem:
                message = one_line(problem, 300)
                raise DataError(f"model.init {self.config.init} does not have all weights: {message}") from None
        return module

    def matrix_sections(self, module: nn.Module) -> dict[str, list[int]]:
        """Query, key and value share one matrix."""
        names = [name for name, _ in module.named_parameters() if name.endswith("attn.c_attn.weight")]
        return {name: [self.config.d_model] * 3 for name in names}

    def flops_per_token(self, module: nn.Module) -> float:
        """6 per weight (2 forward, 4 backward), and the two matrix products of attention over the context."""
        c = self.config
        weights = parameter_count(module) - c.block_size * c.d_model  # positions are looked up, not multiplied
        return 6.0 * weights + 12.0 * c.n_layers * c.d_model * c.block_size

    def export(
        self, module: nn.Module, directory: Path, end_of_text: int | None = None, dtype: str = "float32"
    ) -> None:
        write_gpt2(directory, self.config, self.vocab_size, module.state_dict(), end_of_text, dtype)
