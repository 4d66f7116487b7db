"""Another optimizer than that of the document below: an override, or a config that extends another, may choose one."""

from collections.abc import Container
from typing import Any

from llmtrain.config.model import ModernGptSection
from llmtrain.config.schema import section_class
from llmtrain.config.sizes import fill_shape, fill_trainer
from llmtrain.config.trainer import OPTIMIZER_DEFAULTS, TrainerSection, with_optimizer_defaults

Values = dict[str, Any]


def chosen_optimizer(values: Values) -> str:
    """trainer.optimizer of a document, or its default."""
    default = str(TrainerSection.model_fields["optimizer"].default)
    trainer = values.get("trainer")
    if not isinstance(trainer, dict):
        return default
    return str(trainer.get("optimizer", default))


def change_optimizer(values: Values, former: str, chosen: Container[str]) -> str | None:
    """If the optimizer is no longer the `former` one, remove what the document below has for that one: its defaults,
    which a recorded config contains, and its learning rate, if the model is trained from scratch. `chosen`: fields
    that were set together with the optimizer. Returns a note about the learning rate."""
    trainer = values.get("trainer")
    optimizer = chosen_optimizer(values)
    if optimizer == former or not isinstance(trainer, dict):
        return None
    defaults = _defaults(former, values)
    for name in OPTIMIZER_DEFAULTS["muon"]:
        if f"trainer.{name}" not in chosen and name in trainer and trainer[name] == defaults[name]:
            del trainer[name]
    rate = trainer.get("lr")
    if "trainer.lr" in chosen or rate is None or "muon" not in (former, optimizer):  # the others have the same rates
        return None
    default = _defaults(optimizer, values)["lr"]
    if _starts_from_weights(values.get("model")):
        return (
            f"trainer.lr {rate} was set for {former} and is kept, though {optimizer} needs another one (its default "
            f"for training from scratch is {default}). Set trainer.lr"
        )
    del trainer["lr"]
    return f"trainer.lr {rate} was set for {former}: with {optimizer} it is {default}. Set trainer.lr for another one"


def fill_trainer_section(values: Values, processes: int = 1) -> None:
    """Learning rate and batch of a modern GPT follow from its size, unless they are set."""
    model = values.get("model")
    trainer = values.get("trainer")
    if trainer is None:
        trainer = {}
    if isinstance(model, dict) and isinstance(trainer, dict) and section_class("model", model) is ModernGptSection:
        values["trainer"] = fill_trainer(trainer, fill_shape(model), chosen_optimizer(values), processes)


def _defaults(optimizer: str, values: Values) -> Values:
    """The defaults of the fields that depend on the optimizer."""
    filled: Values = {"trainer": {"optimizer": optimizer}, "model": values.get("model")}
    fill_trainer_section(filled)
    unset = {name: TrainerSection.model_fields[name].default for name in OPTIMIZER_DEFAULTS["muon"]}
    return unset | with_optimizer_defaults(filled["trainer"])


def _starts_from_weights(model: Any) -> bool:
    """Whether the model starts from pretrained weights, whose learning rate cannot be derived from the model size."""
    if not isinstance(model, dict):
        return False
    if model.get("name", "gpt") not in ("gpt", "dummy_gpt"):
        return True
    return model.get("init") not in (None, "random")
