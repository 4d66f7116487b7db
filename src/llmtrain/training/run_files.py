"""Files that describe a run: config.yaml, meta.json, the tokenizer and the model's config."""

from llmtrain.config.check_plugins import describe_plugins
from llmtrain.config.document import dump_document
from llmtrain.data.tokenizers.load import replace_saved_tokenizer, saved_sha256
from llmtrain.files import write_atomic, write_json
from llmtrain.redact import redact_values
from llmtrain.runs.metadata import collect_metadata
from llmtrain.runs.summary import read_meta
from llmtrain.training.build import Components
from llmtrain.training.context import RunContext


def write_run_files(context: RunContext, components: Components, from_step: int) -> None:
    """A resumed run keeps the metadata of its first start and, after its first checkpoint, its tokenizer."""
    config, run = context.requested_config, context.run
    meta = read_meta(run)
    if config.output.save_meta_json and "run_id" not in meta:
        metadata = collect_metadata(run.run_id, config.run.name, str(context.world.device))
        plugins = describe_plugins(config)
        metadata |= {"plugins": plugins} if plugins else {}
        metadata["numerics"] = components.recorded["numerics"]
        write_json(run.meta, {**metadata, **meta})  # a run that starts from another one has recorded its origin
    if config.output.save_config_copy:
        recorded = config.with_values("output", run_id=run.run_id)
        write_atomic(run.config, dump_document(redact_values(recorded.as_dict())))
    if from_step == 0 or saved_sha256(run.tokenizer) != components.recorded["tokenizer_sha256"]:
        replace_saved_tokenizer(components.prepared.tokenizer, run.tokenizer)
    for path in components.adapter.config_files():  # the base model may be deleted before the run is used
        run.model_config.mkdir(exist_ok=True)
        write_atomic(run.model_config / path.name, path.read_text(encoding="utf-8"))
