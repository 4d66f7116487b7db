"""The text of `llmtrain plan`."""

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llmtrain.core.terminal import fit_line, format_table, stream_width
from llmtrain.core.text import format_bytes
from llmtrain.plan.cost import money
from llmtrain.plan.memory_value import Memory
from llmtrain.plan.plan import Plan, Verdict
from llmtrain.plan.target import Target
from llmtrain.plan.time import TimeEstimate
from llmtrain.runs.progress_lines import duration_text

if TYPE_CHECKING:  # it imports torch
    from llmtrain.plan.find import Option

LABEL_WIDTH = 14
AMOUNT_WIDTH = 8
LARGEST_PARTS = 3


def plan_values(plan: Plan, change: "Option | None", options: "Sequence[Option] | None") -> dict[str, Any]:
    return {
        **plan.as_dict(),
        "change": change.as_dict() if change else None,
        "options": None if options is None else [option.as_dict() for option in options],
    }


def plan_text(plan: Plan, change: "Option | None", options: "Sequence[Option] | None") -> str:
    """`change`: what makes a run fit that does not. `options`: of --find."""
    lines = [_line("target", target_text(plan.target))]
    if plan.size is not None:
        lines.append(_line("model", f"{plan.size.parameters:,} parameters, {plan.size.trained:,} trained"))
    if plan.memory is not None:
        lines += ["", *_memory_lines(plan.memory, plan.target)]
    if plan.token_store is not None and plan.token_store.size is not None:
        lines.append(_amount("token store", plan.token_store.size, f"from {plan.token_store.source}"))
    if plan.time is not None:
        lines += ["", *_time_lines(plan.time)]
    lines += [*_cost_lines(plan), "", _line("verdict", f"{plan.verdict.value}: {plan.reason}")]
    if change is not None:
        lines.append(_line("remedy", f"{change.arguments} ({_need(change.plan)})"))
    elif plan.verdict is Verdict.DOES_NOT_FIT and plan.memory and plan.memory.is_from_formula:
        lines.append(_line("remedy", "run llmtrain plan where torch is installed: it finds settings that fit"))
    elif plan.verdict is Verdict.DOES_NOT_FIT and options is None:
        lines.append(_line("remedy", "no setting makes it fit; use more GPUs, more memory or a smaller model"))
    text = "\n".join(_fit(line) for line in lines)
    if options is None:
        return text
    return f"{text}\n\n{options_text(options, plan.verdict is not Verdict.UNKNOWN)}"


def _fit(line: str) -> str:
    """In a terminal, wrapped below its text; elsewhere, and what is meant to be copied, as it is."""
    width = stream_width(sys.stdout)
    if width is None or line.startswith("remedy"):
        return line
    indent = LABEL_WIDTH
    if line.startswith("  "):
        indent += 2 + AMOUNT_WIDTH + 2
    return fit_line(line, width, indent)


def target_text(target: Target) -> str:
    """`2 nodes x 4 GPUs, h100-80g (84.9 GB each)`"""
    memory = "memory not known" if target.memory_bytes is None else format_bytes(target.memory_bytes)
    if target.device == "cpu":
        processes = f", {target.processes_per_node} processes" if target.processes_per_node > 1 else ""
        return f"CPU{processes}, {memory}"
    name = target.gpu.name if target.gpu else "GPU"
    count = f"{target.nodes} x " if target.nodes > 1 else ""
    return f"{count}{target.processes_per_node} x {name}, {memory} each"


def _line(label: str, text: str) -> str:
    return f"{label:{LABEL_WIDTH}}{text}"


def _memory_lines(memory: Memory, target: Target) -> Iterator[str]:
    yield "memory of one process"
    yield _amount("weights", memory.weights)
    yield _amount("gradients", memory.gradients)
    yield _amount("optimizer", memory.optimizer)
    if memory.gathered:
        yield _amount("gathered", memory.gathered, "whole blocks of fsdp")
    if memory.activations is None:
        yield f"  {'activations':{LABEL_WIDTH}}unknown: {memory.unknown['activations']}"
    else:
        yield _amount("activations", memory.activations, _largest_parts(memory))
    if memory.peak is not None and memory.needed is not None:
        yield _amount("peak", memory.peak, _peak_source(memory))
        if target.device == "cuda":
            yield _amount("overhead", memory.overhead, "CUDA, and what lies unused between tensors")
            yield _amount("needed", memory.needed)
    if target.device == "cuda":
        yield _amount("CPU memory", memory.host, "while the model is loaded and checkpoints are saved")
    whole = "" if memory.disk is None else f", {format_bytes(memory.disk)} for all that are kept"
    yield f"  {'disk':{LABEL_WIDTH}}{format_bytes(memory.checkpoint)} per checkpoint{whole}"


def _largest_parts(memory: Memory) -> str:
    largest = [f"{name} {format_bytes(size)}" for name, size in list(memory.parts.items())[:LARGEST_PARTS]]
    text = ", ".join(largest)
    if memory.activations is not None and sum(memory.parts.values()) > memory.activations:
        return f"at the peak, before all gradients exist: {text}"
    return text


def _peak_source(memory: Memory) -> str:
    if memory.measured_by is None or memory.predicted_peak is None:
        return memory.peak_source
    difference = memory.predicted_peak / (memory.peak or 1) - 1
    return f"{memory.peak_source}; predicted {format_bytes(memory.predicted_peak)}, {100 * difference:+.0f} %"


def _amount(label: str, size: int, note: str = "") -> str:
    return f"  {label:{LABEL_WIDTH}}{format_bytes(size):>{AMOUNT_WIDTH}}{f'  {note}' if note else ''}".rstrip()


def _time_lines(time: TimeEstimate) -> Iterator[str]:
    if time.tokens_per_second is None:
        yield _line("time", f"unknown: {time.unknown['tokens_per_second']}")
        return
    yield _line("speed", f"{time.tokens_per_second:,.0f} tokens/s, {time.uncertainty_text}, {time.source}")
    if time.total_seconds is None:
        yield _line("time", f"unknown: {time.unknown['training_seconds']}")
        return
    parts = [f"{duration_text(time.total_seconds)} for {time.steps:,} steps"]
    if time.first_step_seconds is not None:
        parts.append(f"{time.first_step_seconds:.0f} s to the first")
    if time.saving_share is not None:
        parts.append(f"{time.saving_share * 100:.1f} % saving checkpoints")
    yield _line("time", ", ".join(parts))


def _cost_lines(plan: Plan) -> Iterator[str]:
    cost = plan.cost
    if cost is None:
        return
    if cost.gpu_hours is not None:
        yield _line("GPU-hours", f"{cost.gpu_hours:,.2f}")
    if cost.cost is None or cost.currency is None:
        yield _line("cost", f"unknown: {cost.source}")
        return
    spot = "" if cost.spot_cost is None else f", {money(cost.spot_cost, cost.currency)} on spot nodes"
    yield _line("cost", f"{money(cost.cost, cost.currency)}{spot}, at {cost.source}")


def _need(plan: Plan) -> str:
    if plan.memory is None or plan.memory.needed is None:
        return "memory not known"
    return f"{format_bytes(plan.memory.needed)} per process"


def options_text(options: Sequence["Option"], is_known: bool = True) -> str:
    """`is_known`: whether it is known what the run needs."""
    if not options and not is_known:
        return "No setting is known to fit: what the run needs, or the memory of the target, is not known."
    if not options:
        return "Nothing fits: use more memory or more GPUs, or a smaller model."
    rows = [["", "needs", "tokens/s", "time", "GPU-hours", "cost"]]
    settings = []
    for number, option in enumerate(options, start=1):
        time = option.plan.time
        cost = option.plan.cost
        speed = duration = hours = price = "-"
        if time is not None and time.tokens_per_second is not None:
            speed = f"{time.tokens_per_second:,.0f}"
        if time is not None and time.total_seconds is not None:
            duration = duration_text(time.total_seconds)
        if cost is not None and cost.gpu_hours is not None:
            hours = f"{cost.gpu_hours:,.2f}"
        if cost is not None and cost.cost is not None and cost.currency is not None:
            price = money(cost.cost, cost.currency)
        needed = option.plan.memory.needed if option.plan.memory else None
        rows.append([str(number), format_bytes(needed or 0), speed, duration, hours, price])
        settings.append(f"{number:{len(str(len(options)))}}  {option.arguments}")
    return "\n".join([format_table(rows), "", *settings])  # below the table, so that they are never cut
