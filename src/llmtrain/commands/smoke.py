"""llmtrain smoke: the smallest distributed training job, to test a new cluster."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain.commands.options import ConfigOption, JsonOption, SetOption, show
from llmtrain.commands.processes import forwarded_options

if TYPE_CHECKING:
    from llmtrain.config.distributed import DistributedSection
    from llmtrain.config.run import RunSection


def command(
    config: ConfigOption = None,
    set_: SetOption = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the samples.")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="Samples per step, over all processes.")] = 256,
    samples: Annotated[int, typer.Option(min=1, help="Number of synthetic samples.")] = 4096,
    features: Annotated[int, typer.Option(min=1, help="Features per sample.")] = 128,
    classes: Annotated[int, typer.Option(min=2, help="Number of classes.")] = 4,
    lr: Annotated[float, typer.Option(min=1e-9, help="Learning rate.")] = 3e-3,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of samples and weights.")] = 42,
    processes: Annotated[int | None, typer.Option(min=1, help="Number of processes on this machine.")] = None,
    json_: JsonOption = False,
) -> None:
    """Train a small classifier on synthetic samples, with the processes, network and device of a real run. Of the
    config only `run.device` and the section `distributed` are used."""
    from llmtrain.config.load import load_config
    from llmtrain.core.logs import setup_logging

    sizes = {"epochs": epochs, "batch": batch, "samples": samples, "features": features, "classes": classes}
    loaded = load_config(config, set_ or [])
    setup_logging(loaded.logging)
    if not processes:
        smoke_here(loaded.distributed, loaded.run, json_, lr=lr, seed=seed, **sizes)
        return
    from llmtrain.distributed.workers import local_node, run_processes, worker_command

    words = ["smoke"]
    for name, value in {**sizes, "lr": lr, "seed": seed}.items():
        words += [f"--{name}", str(value)]
    words += forwarded_options(config, set_ or [], json_)
    run_processes(local_node(processes), worker_command(*words), loaded.distributed)


def smoke_here(distributed: "DistributedSection", run: "RunSection", json_: bool, **options: Any) -> None:
    """Train in this process, with the defaults of train_classifier for what is not given."""
    from llmtrain.training.shutdown import StopFlag

    with StopFlag():  # nothing is saved, so a signal ends it immediately
        from llmtrain.training.smoke import train_classifier

        result = train_classifier(distributed, run, **options)
    if result is not None:
        show(json_, result, _text(result))


def _text(result: dict[str, Any]) -> str:
    count = result["world_size"]
    return (
        f"{count} process{'es' if count > 1 else ''} on {result['device']}: accuracy {result['accuracy']:.1%}, "
        f"loss {result['first_loss']:.4f} -> {result['final_loss']:.4f} in {result['seconds']:.1f} s"
    )
