"""The text of `accel-parallel explain`, 80 columns wide."""

import re
from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap
from typing import Any

from accel_parallel.asked import Parallelism
from accel_parallel.explain import Plan, Step
from accel_parallel.metrics import format_bytes, format_processes
from accel_parallel.units import Unit, shard_sizes

WIDTH = 80
_LABEL = 26
_TYPES = {"bf16": "bfloat16", "fp16": "float16"}
_MOST_LINES = 12


def plan_lines(name: str, plan: Plan) -> list[str]:
    """What is launched, its units in a table, what they move, and what stays in the root unit."""
    asked, root = plan.asked, plan.model.root
    model = f"{root.class_name}: {root.size:,} parameters, {format_bytes(4 * root.size)} in float32"
    if not plan.sharded:
        return [f"{name}: {_kind(plan)}, {format_processes(asked.world_size)}", model, *_fill(_unsharded(plan))]
    copies = f", {plan.sharding.replicas} replicas" if plan.sharding.replicas > 1 else ""
    over = format_processes(plan.sharding.shard_size)
    first = f"{name}: {_kind(plan)}, {asked.sharding_strategy} over {over}{copies}"
    precision = f", {asked.mixed_precision}" if asked.mixed_precision != "no" else ""
    return [*_fill(f"{first}{precision}"), model, "", *_table(plan), "", *_costs(plan), *_root(plan)]


def threshold_lines(plan: Plan, steps: Sequence[Step]) -> list[str]:
    """The values of min_num_params that make other units; the current one is marked."""
    if not steps:
        by = {"TRANSFORMER_BASED_WRAP": "units go by class", "NO_WRAP": "nothing is wrapped"}
        return ["", *_fill(f"fsdp_min_num_params is not read: {by.get(plan.wrapping.policy, plan.wrapping.policy)}")]
    lines = ["", "thresholds of min_num_params at which the plan changes (* as asked):"]
    for step in steps:
        values = f"{step.first:,} to {step.last:,}" if step.last else f"from {step.first:,}"
        what = ", ".join(f"{name} x{count}" for name, count in step.classes.items()) or "only the root"
        fails = f"; fails: {step.fails}" if step.fails else ""
        head = f"{'*' if step.current else ' '} {values:>27}  "
        lines += wrap(f"{what}{fails}", WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
    return lines


def other_lines(plan: Plan, other: Plan) -> list[str]:
    """What the other version of FSDP would make of the same file."""
    version, unlike = plan.wrapping.version, other.wrapping.version
    ours, theirs = ({unit.name: unit for unit in each.units} for each in (plan, other))
    number_of = "1 unit" if len(theirs) == 1 else f"{len(theirs)} units"
    lines = [f"{number_of} where version {version} has {len(ours)}"]
    for number, there, missing in ((version, ours, theirs), (unlike, theirs, ours)):
        only = [unit for name, unit in there.items() if name not in missing]
        if only:
            lines.append(f"only in version {number}: {', '.join(map(_label, _equal_units(only)))}")
    if plan.asked.sharding_strategy != other.asked.sharding_strategy:
        keys = {1: "fsdp_sharding_strategy", 2: "fsdp_reshard_after_forward"}
        lines.append(
            f"{plan.asked.sharding_strategy} becomes {other.asked.sharding_strategy} over "
            f"{format_processes(other.sharding.shard_size)}: version {unlike} reads {keys[unlike]}"
        )
    if version == 2 and plan.asked.sharding_strategy == "HYBRID_SHARD":
        lines.append("Accelerate refuses parallelism_config with version 1")
    if plan.wrapping.policy == "SIZE_BASED_WRAP":
        lines.append(
            "fsdp_min_num_params means something else: version 1 wraps what has at least as many parameters outside "
            "of the units inside it, version 2 what has more, with all that is inside it"
        )
    if plan.sharded and other.sharded:
        both = [(max(each.shards), max(each.peaks.values())) for each in (plan, other)]
        (held, peak), (other_held, other_peak) = both
        lines.append(f"shards {_change(held, other_held)}, un-sharded peak {_change(peak, other_peak)}")
    lines += [f"{problem.severity}: {problem.message}" for problem in other.problems()]
    return ["", f"version {unlike} of the same file:", *(part for line in lines for part in _fill(line, "  "))]


def _kind(plan: Plan) -> str:
    words = {Parallelism.SINGLE: "no parallelism", Parallelism.DDP: "DDP"}
    return words.get(plan.asked.parallelism, f"FSDP version {plan.wrapping.version}")


def _unsharded(plan: Plan) -> str:
    """Why no unit is gathered, and what moves instead."""
    size = format_bytes(4 * plan.model.root.size)
    if plan.asked.world_size == 1:
        return "nothing is sharded and nothing is reduced: one process holds the whole model"
    holds = f"nothing is sharded: each process holds the whole model, {size}"
    if plan.asked.parallelism is Parallelism.DDP:
        return f"{holds}; gradients are all-reduced in buckets, {size} a step"
    count, moved = plan.traffic["backward", "all_reduce"]
    return f"{holds}; gradients are all-reduced by unit, {format_bytes(moved)} a step in {count} calls"


def _table(plan: Plan) -> list[str]:
    lines = [f"{'unit (xN: each of N)':{_LABEL}} {'parameters':>13} {'shard':>11} {'gathered':>15} {'peak':>11}"]
    for group in _equal_units(plan.units):
        unit = group[0]
        held = 4 * max(shard_sizes(unit, plan.sharding))
        gathered = f"{plan.gathers(unit)} x {format_bytes(plan.gathered(unit))}" if unit.parameters else "-"
        peak = max(plan.peaks[each.name] for each in group)
        lines += _row(_label(group), unit.size, held, gathered, peak)
    total = format_bytes(plan.gathered_bytes)
    return [*lines, *_row("total", plan.model.root.size, max(plan.shards), total, max(plan.peaks.values()))]


def _row(label: str, size: int, held: int, gathered: str, peak: int) -> list[str]:
    """One line, or two if the name is long."""
    numbers = f" {size:>13,} {format_bytes(held):>11} {gathered:>15} {format_bytes(peak):>11}"
    return [f"{label:{_LABEL}}{numbers}"] if len(label) <= _LABEL else [label, " " * _LABEL + numbers]


def _costs(plan: Plan) -> list[str]:
    gathers = sum(count for (_, kind), (count, _) in plan.traffic.items() if kind == "all_gather")
    reduces, reduced = plan.traffic["backward", "reduce_scatter"]
    low = _TYPES.get(plan.asked.mixed_precision, "float32")
    types = ["float32" if number == 4 else low for number in (plan.sharding.param_bytes, plan.sharding.reduce_bytes)]
    lines = [
        f"a forward and a backward pass: {gathers} all-gathers of {format_bytes(plan.gathered_bytes)} ({types[0]}), "
        f"{reduces} reduce-scatters of {format_bytes(reduced)} ({types[1]}); whole tensors, padding included"
    ]
    if ("backward", "all_reduce") in plan.traffic:
        count, moved = plan.traffic["backward", "all_reduce"]
        lines.append(f"between replicas: {count} all-reduces of {format_bytes(moved)}")
    shards = plan.shards
    if min(shards) != max(shards):
        lines.append(
            f"shards are uneven: {format_bytes(max(shards))} on the first process, "
            f"{format_bytes(min(shards))} on the one with the least"
        )
    lines.append(
        f"un-sharded peak: {format_bytes(max(plan.peaks.values()))} of gathered parameters at once, the next unit's "
        "included; activations and gradients come on top"
    )
    return [part for line in lines for part in _fill(line)]


def _root(plan: Plan) -> list[str]:
    root = plan.units[0]
    if not root.parameters:
        return ["", "nothing stays in the root unit"]
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, shape in root.parameters.items():
        groups.setdefault((_pattern(name), shape), []).append(name)
    shared = _shared(plan)
    lines = []
    for (_, shape), names in groups.items():
        times = f" x{len(names)}" if len(names) > 1 else ""
        tied = f", shared with {', '.join(shared[names[0]])}" if names[0] in shared else ""
        lines.append(f"  {_span(names)} ({' x '.join(map(str, shape))}){times}{tied}")
    rest = len(lines) - _MOST_LINES
    return ["", "in the root unit:", *lines[:_MOST_LINES], *([f"  and {rest} more"] if rest > 0 else [])]


def _shared(plan: Plan) -> Mapping[str, list[str]]:
    """Modules that hold a parameter beside the one it is named after."""
    found: dict[str, list[str]] = {}
    for module in plan.model.modules.values():
        for name in module.own:
            if name.rpartition(".")[0] != module.name:
                found.setdefault(name, []).append(module.name)
    return found


def _label(group: Sequence[Unit]) -> str:
    unit, count = group[0], len(group)
    name = _span([each.name for each in group]) or "(root)"
    also = "".join(f" + {other}" for other in unit.modules if other != unit.name) if count == 1 else ""
    return f"{name}{also} {unit.class_name}" + (f" x{count}" if count > 1 else "")


def _span(names: Sequence[str]) -> str:
    """`blocks.0.attn` to `blocks.7.attn` -> `blocks.0-7.attn`; with several numbers, or gaps, a star for each."""
    if len(names) == 1:
        return names[0]
    numbers = [re.findall(r"(?<![^.])\d+(?![^.])", name) for name in names]
    if all(len(each) == 1 for each in numbers):
        found = [int(each[0]) for each in numbers]
        if found == list(range(found[0], found[0] + len(found))):
            return _pattern(names[0]).replace("*", f"{found[0]}-{found[-1]}")
    return _pattern(names[0])


def _change(ours: int, theirs: int) -> str:
    one, two = format_bytes(ours), format_bytes(theirs)
    return one if one == two else f"{one} -> {two}"


def _fill(text: str, indent: str = "") -> Iterable[str]:
    return wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)


def _equal_units(found: Sequence[Unit]) -> list[list[Unit]]:
    """Units of one class with the same shapes, at places that differ only in numbers, together; in their order."""
    groups: dict[Any, list[Unit]] = {}
    for unit in found:
        key = (_pattern(unit.name), unit.class_name, tuple(unit.parameters.values()), unit.reshards)
        groups.setdefault(key, []).append(unit)
    return list(groups.values())


def _pattern(name: str) -> str:
    """`blocks.3.attn` -> `blocks.*.attn`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
