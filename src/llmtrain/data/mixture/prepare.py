"""`mixture`: opens or builds the token store of each source; other weights need no new one."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llmtrain import registry
from llmtrain.config.mixture import MixtureSection
from llmtrain.config.source_problems import of_source
from llmtrain.data.base import DataModule, PreparedData, PreparedMixture, TextData
from llmtrain.errors import DataError, LlmtrainError
from llmtrain.plugins import plugin_errors


class Mixture(DataModule):
    config: MixtureSection

    def __init__(self, config: MixtureSection, seed: int) -> None:
        super().__init__(config, seed)
        self.modules: list[DataModule] = []
        for index, section in enumerate(config.sections()):
            data_class = registry.resolve("data.name", section.name, registry.DATA)
            with source_errors(config, index), plugin_errors(data_class, "__init__", DataError):
                self.modules.append(data_class(section, seed))

        if config.deduplicate:
            earlier: list[TextData] = []
            for module in self.modules:
                if isinstance(module, TextData):
                    module.deduplicates = True
                    module.earlier = list(earlier)
                    earlier.append(module)

    def identity(self) -> dict[str, Any]:
        return {"kind": "mixture", "sources": [module.identity() for module in self.modules]}

    def prepare(self, threads: int) -> PreparedMixture:
        sources: list[PreparedData] = []
        for index, module in enumerate(self.modules):
            with source_errors(self.config, index):
                prepared = module.prepare(threads)
                assert isinstance(prepared, PreparedData)  # a source is no mixture
                sources.append(prepared)
        fingerprints = "".join(source.fingerprint for source in sources)
        return PreparedMixture(sources[0].tokenizer, sources, hashlib.sha256(fingerprints.encode()).hexdigest())


@contextmanager
def source_errors(config: MixtureSection, index: int) -> Iterator[None]:
    """Errors say which source they are about, with the names that its fields have in the mixture."""
    try:
        yield
    except LlmtrainError as error:
        error.what = f"Source '{config.labels()[index]}': {of_source(error.what, index)}"
        if error.remedy is not None:
            error.remedy = of_source(error.remedy, index)
        raise
