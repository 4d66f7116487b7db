"""What a run with `trainer.objective` dpo or ipo compares with: the model at step 0."""

from llmtrain.config.model import HfCausalLmSection, ModelSection
from llmtrain.core.logs import warn, warn_once
from llmtrain.data.cache_dir import token_cache_dir
from llmtrain.data.preferences.pair_batches import References
from llmtrain.errors import CheckpointError, Interrupted
from llmtrain.training.components import Components
from llmtrain.training.context import RunContext
from llmtrain.training.model_handle import ModelHandle
from llmtrain.training.objectives.references import (
    ReferenceModel,
    ReferenceStore,
    compute_references,
    identify_reference,
    read_references,
    with_references,
)
from llmtrain.training.origin import load_weights, origin_of
from llmtrain.training.resume_hint import add_resume_hint


def prepare_references(context: RunContext, components: Components, model: ModelHandle) -> Components:
    """The components with the reference log-probabilities in their batches, if the objective needs them. Called on
    every rank before a checkpoint is loaded: the model is as at step 0, apart from the weights of an origin that a
    resumed run has left behind."""
    if not components.objective.needs_reference:
        return components
    world = context.world
    cache_dir = token_cache_dir(context.config.data)
    recorded = _recorded(context)
    if recorded is None:
        _warn_of_dropout(context.config.model)
        reference = identify_reference(components, model, world, context.config.run.threads)
    else:
        reference = recorded
    store = ReferenceStore.of_key(cache_dir, reference.key)
    found = read_references(store, components, world) if _has_same_data(context, components) else None
    if found is None and recorded is not None:
        reference = _rebuilt(context, components, model, recorded)
        store = ReferenceStore.of_key(cache_dir, reference.key)
    if found is None:
        found = _computed(context, components, model, store)
    components.recorded["reference"] = reference.as_dict()
    return with_references(components, found)


def _warn_of_dropout(model: ModelSection) -> None:
    """A model with dropout differs from its reference before it has learned anything."""
    name, dropout = "model.dropout", getattr(model, "dropout", 0.0)
    if isinstance(model, HfCausalLmSection) and model.lora:
        name, dropout = "model.lora.dropout", model.lora.dropout
    if dropout:
        warn_once(
            "TRAIN",
            f"{name} {dropout:g} is drawn in training and not for the reference log-probabilities, so the losses are "
            f"noisier; set {name} to 0",
        )


def _computed(
    context: RunContext, components: Components, model: ModelHandle, store: ReferenceStore
) -> dict[str, References]:
    """The log-probabilities by the model as it is now, which the store then has."""
    control = context.world.control
    try:
        found = compute_references(components, model, context.world, lambda: control.any(context.stop.requested), store)
    except Interrupted as error:
        add_resume_hint(context, error, step=0)
        raise
    control.on_rank0(lambda: store.finish(found))
    return found


def _recorded(context: RunContext) -> ReferenceModel | None:
    """The model at step 0 that the checkpoint of a resumed run records."""
    resumption = context.resumption
    if resumption is None or resumption.checkpoint is None:
        return None
    recorded = resumption.checkpoint.state().get("reference")
    if not isinstance(recorded, dict):
        raise CheckpointError(f"{resumption.checkpoint.path} does not record the model at step 0.")
    return ReferenceModel(str(recorded.get("key")), str(recorded.get("weights_sha256")))


def _has_same_data(context: RunContext, components: Components) -> bool:
    """False for a run that is resumed with other pairs, by --allow-config-change."""
    resumption = context.resumption
    if resumption is None or resumption.checkpoint is None:
        return True
    return bool(resumption.checkpoint.state().get("data_fingerprint") == components.recorded["data_fingerprint"])


def _rebuilt(
    context: RunContext, components: Components, model: ModelHandle, recorded: ReferenceModel
) -> ReferenceModel:
    """Give the model its weights of step 0 again."""
    world = context.world
    run = context.run
    origin = world.control.on_rank0(lambda: origin_of(run))
    if origin:
        world.control.all_or_none(lambda: load_weights(origin, model.module))
    reference = identify_reference(components, model, world, context.config.run.threads)
    if reference.weights_sha256 != recorded.weights_sha256:
        raise CheckpointError(
            f"Run '{run.run_id}' compares with its model at step 0, whose log-probabilities are missing in "
            f"{token_cache_dir(context.config.data)} and cannot be computed again: that model has changed.",
            remedy="Restore the cache directory, or start a new run.",
        )
    if reference.key != recorded.key:
        warn(
            "TRAIN",
            "the log-probabilities at step 0 are computed again with other settings, software or hardware than at the "
            "start of the run: from here on it is not bit-exact with an uninterrupted run",
        )
    return reference
