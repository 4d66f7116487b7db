"""Options that several commands share, and the output of a result."""

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Annotated, Any

import typer

from llmtrain.commands.cluster_options import ContextOption, KubeconfigOption, NamespaceOption
from llmtrain.core.arguments import MINIMUM, ClusterPlace, Sampling, Source
from llmtrain.core.redact import redact, redact_words
from llmtrain.core.terminal import Color, discard, say
from llmtrain.errors import UsageError


def complete_preset(incomplete: str) -> list[str]:
    """Presets, for shell completion; the shell itself completes files if there is no such preset."""
    from llmtrain.config.load import list_presets

    return [name for name in list_presets() if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Runs in the default directory, for shell completion."""
    from llmtrain.runs.directory import list_runs

    return [run.run_id for run in list_runs(DEFAULT_ROOT) if run.run_id.startswith(incomplete)]


ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        metavar="CONFIG",
        help="Config file or name of a preset.",
        show_default=False,
        autocompletion=complete_preset,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a config field: section.field=value. Repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
RunOption = Annotated[
    str | None,
    typer.Option("--run", help="Run id or path of a run directory.", show_default=False, autocompletion=complete_run),
]
RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="As --run.", show_default=False, autocompletion=complete_run),
]
RunArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]...",
        help="As --run. Several runs, adapter or model directories are shown beside each other.",
        show_default=False,
        autocompletion=complete_run,
    ),
]
AdapterOption = Annotated[
    str | None, typer.Option("--adapter", help="Directory of a peft adapter.", show_default=False)
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Model directory or name on the hub; with --run or --adapter: the base model.",
        show_default=False,
    ),
]
ModelDirOption = Annotated[
    str | None,
    typer.Option("--model-local-dir", help="Set model.path, and model.local_files_only to true.", show_default=False),
]
TokenizerDirOption = Annotated[
    str | None, typer.Option("--tokenizer-local-dir", help="Set model.tokenizer_path.", show_default=False)
]
LocalOnlyOption = Annotated[bool, typer.Option("--local-files-only", help="Set model.local_files_only to true.")]
RootOption = Annotated[str, typer.Option("--root", help="Directory of all runs.")]
CheckpointOption = Annotated[
    str, typer.Option("--checkpoint", help="best (or latest if there is none), latest, or step_<N>.")
]

DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]

DEFAULT_ROOT = Source.root
"""The default of output.root_dir too, whose module is not imported because it would slow down --help."""

# Groups: a command that takes a Source, a Sampling or a ClusterPlace has one option per field of it.
SOURCE = Source()
SOURCES = (SOURCE,)
"""Of a command that takes several models."""
SAMPLING = Sampling()
CURRENT = ClusterPlace()
RUN_ARGUMENT = "run_argument"
"""Name of the argument in the parser; a command that takes a Source accepts the run without --run too."""
_GROUP_OPTIONS: dict[str, Any] = {
    "namespace": NamespaceOption,
    "kubeconfig": KubeconfigOption,
    "context": ContextOption,
    "run": RunOption,
    "adapter": AdapterOption,
    "model": ModelOption,
    "checkpoint": CheckpointOption,
    "root": RootOption,
    "max_new_tokens": Annotated[
        int, typer.Option(min=MINIMUM["max_new_tokens"], help="Maximum number of tokens to generate.")
    ],
    "temperature": Annotated[float, typer.Option(min=0.0, help="0 always takes the most likely token.")],
    "top_k": Annotated[int, typer.Option(min=MINIMUM["top_k"], help="Sample from this many most likely tokens.")],
    "seed": Annotated[int, typer.Option(min=MINIMUM["seed"], help="Random seed.")],
    "top_p": Annotated[
        float | None, typer.Option(help="Sample from the most likely tokens that have this total probability.")
    ],
}


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one option per field of its groups. The default of a group has the defaults of the options."""
    groups: dict[str, Source | Sampling | ClusterPlace] = {}
    several = set()
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        takes_several = parameter.default is SOURCES
        group = SOURCE if takes_several else parameter.default
        if not isinstance(group, Source | Sampling | ClusterPlace):
            parameters.append(parameter)
            continue
        groups[parameter.name] = group
        for name, default in vars(group).items():
            parameters.append(parameter.replace(name=name, annotation=_GROUP_OPTIONS[name], default=default))
        if isinstance(group, Source):
            annotation = RunArguments if takes_several else RunArgument
            if takes_several:
                several.add(parameter.name)
            parameters.append(parameter.replace(name=RUN_ARGUMENT, annotation=annotation, default=None))

    signature = inspect.Signature(parameters)

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        bound = signature.bind(*arguments, **options)
        bound.apply_defaults()
        values = bound.arguments
        for parameter, group in groups.items():
            given = {name: values.pop(name) for name in vars(group)}
            if not isinstance(group, Source):
                values[parameter] = replace(group, **given)
                continue
            named = values.pop(RUN_ARGUMENT)
            if parameter in several:
                values[parameter] = _sources(named or [], replace(group, **given))
            else:
                values[parameter] = replace(group, **{**given, "run": _one_run(named, given["run"])})
        command(**values)

    # Typer reads the names and defaults from the one and the types from the other.
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _sources(names: list[str], options: Source) -> list[Source]:
    if len(names) < 2:
        return [replace(options, run=_one_run(names[0] if names else None, options.run))]
    if options.run or options.adapter:
        raise UsageError(
            f"Several models were given: {', '.join(names)}; --run and --adapter name another one.",
            remedy="Pass all of them without --run and --adapter.",
        )
    from llmtrain.commands.side_by_side import named_sources

    return named_sources(names, options)


def _one_run(argument: str | None, option: str | None) -> str | None:
    """The run, given as an argument or with --run."""
    if argument is not None and option is not None:
        raise UsageError(
            f"The run was given twice: '{argument}' and --run '{option}'.",
            remedy="Pass one run, with or without --run.",
        )
    return option if argument is None else argument


def shorthands(overrides: list[str] | None, model: str | None, tokenizer: str | None, is_local: bool) -> list[str]:
    """The overrides, followed by those of the shorthand options."""
    settings = list(overrides or [])
    if model is not None:
        settings.append(f"model.path={json.dumps(model)}")
    if tokenizer is not None:
        settings.append(f"model.tokenizer_path={json.dumps(tokenizer)}")
    if is_local or model is not None:
        settings.append("model.local_files_only=true")
    return settings


def is_given(ctx: typer.Context, parameter: str) -> bool:
    """Whether the command line has this option, rather than its default being used."""
    source = ctx.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def given_options(ctx: typer.Context) -> list[str]:
    """The options of the command line, without arguments and secrets, as one would type them again."""
    words: list[str] = []
    for parameter in ctx.command.params:
        if not is_given(ctx, parameter.name or "") or parameter.param_type_name != "option":
            continue
        name = next(option for option in parameter.opts if option.startswith("--"))
        value = ctx.params[str(parameter.name)]
        if isinstance(value, bool):
            words.append(name)
            continue
        for item in value if isinstance(value, list | tuple) else [value]:
            words += [name, str(item)]
    return redact_words(words)


def print_warning(text: str) -> None:
    say(redact(f"warning: {text}"), sys.stderr, {"warning:": "yellow"})


def show(as_json: bool, value: dict[str, Any], text: str, colors: Mapping[str, Color] | None = None) -> None:
    """Print the result of a command as one JSON object, or as text, of which some words have `colors`. A closed pipe
    (`| head`) is not an error."""
    try:
        if as_json:
            print(json.dumps(value, indent=2), flush=True)
        else:
            say(text, colors=colors)
    except BrokenPipeError:
        discard(sys.stdout)
