"""From what was seen of somebody's script, from outside, to the answers."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from accel_parallel.asked import Asked
from accel_parallel.metrics import format_bytes, format_processes
from accel_parallel.rehearsal.check import Check, Rehearsal, table
from accel_parallel.rehearsal.configuration import is_what_was_asked
from accel_parallel.rehearsal.losses import Rank, causes, is_low, learns_what_ddp_learns
from accel_parallel.rehearsal.numbers import SAME
from accel_parallel.rehearsal.sharding import SENDS, SHARDED

RUNS = "does it run to its end?"
_FIELDS = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
}
_PLUGINS = ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin", "gradient_accumulation_plugin",
            "parallelism_config", "kwargs_handlers", "dynamo_plugin", "cpu")  # fmt: skip


def judge_script(
    name: str, processes: int, script: Sequence[str], facts: Mapping[str, Any], references: Sequence[Mapping[str, Any]]
) -> Rehearsal:
    """`references` are the facts of the same script under DDP: none, one, or two to see whether it is reproducible."""
    world = {"WORLD_SIZE": str(processes)}
    asked = Asked.from_environment({**facts.get("environment", {}), **world})
    ranks: Sequence[Rank] = facts["ranks"]
    checks = (
        _runs_to_its_end(ranks),
        _is_what_was_asked(processes, asked, facts),
        _is_sharded(asked, ranks),
        learns_what_ddp_learns(asked, ranks, references),
        _sends(ranks),
    )
    title = f"{name}, {format_processes(processes)}: {shlex.join(script)}"
    return Rehearsal(name, title, checks, facts["seconds"], dict(facts), _notes(asked, facts))


def differs(rehearsal: Rehearsal) -> bool:
    """Whether it learned something else than under DDP."""
    return any(check.question == SAME and check.holds is False for check in rehearsal.checks)


def _runs_to_its_end(ranks: Sequence[Rank]) -> Check:
    if not ranks:
        return Check("runs", RUNS, None, "nothing was started")
    failed = causes(ranks)
    if failed:
        return Check("runs", RUNS, False, "the script failed", tuple(failed))
    steps = max(rank["optimizer_steps"] for rank in ranks)
    return Check("runs", RUNS, True, f"{steps} optimizer steps, {ranks[0]['backward_passes']} backward passes")


def _is_what_was_asked(processes: int, asked: Asked, facts: Mapping[str, Any]) -> Check:
    # What stopped the script is told where it is asked whether it ran.
    told = [{"substitutions": rank.get("substitutions", [])} for rank in facts["ranks"]]
    return is_what_was_asked(processes, asked.fsdp, {**facts, "ranks": told})


def _is_sharded(asked: Asked, ranks: Sequence[Rank]) -> Check:
    seen = [(rank, model) for rank in ranks for model in rank.get("models", []) if model["trainable_elements"]]
    if not seen:
        why = "no model that is trained was prepared"
        alone = asked.fsdp and bool(ranks) and not causes(ranks)
        return Check(
            "sharded", SHARDED, False if alone else None, why, (f"{why}: nothing is sharded",) if alone else ()
        )
    mismatches = sorted({line for _, model in seen for line in model["mismatches"]})
    mismatches += _one_unit(asked, [model for _, model in seen])
    rows = [
        (rank, [model["class"], model["parallelism"], str(len(model["units"])), format_bytes(model["whole_bytes"]),
                format_bytes(model["held_bytes"])])
        for rank, model in seen
    ]  # fmt: skip
    shares = dict.fromkeys(f"{model['class']} {model['held_bytes'] / model['whole_bytes']:.1%}" for _, model in seen)
    summary = f"each process holds of its parameters: {', '.join(shares)}"
    header = ["model", "is", "units", "parameters", "held"]
    lines = (*_by_rank(header, rows, ranks, left=2), *_memory(ranks))
    return Check("sharded", SHARDED, not mismatches, summary, tuple(mismatches), lines)


def _one_unit(asked: Asked, models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of the largest model: a script may train small ones besides, which have none of its layers."""
    largest = max(models, key=lambda model: model["whole_elements"])
    if asked.wrap_policy != "TRANSFORMER_BASED_WRAP" or asked.wrap_classes or largest["own_plugin"]:
        return []
    if any(largest["units"]) or not asked.fsdp:
        return []
    return [
        f"no class to wrap is named, and {largest['class']} names none itself (_no_split_modules): it is one unit, and "
        "all its parameters are gathered at once; name a layer's class in fsdp_transformer_layer_cls_to_wrap"
    ]


def _memory(ranks: Sequence[Rank]) -> tuple[str, ...]:
    rows = [
        (rank, [optimizer["class"], str(optimizer["steps"]), format_bytes(optimizer["gradient_bytes"]),
                format_bytes(optimizer["state_bytes"])])
        for rank in ranks for optimizer in rank.get("optimizers", [])
    ]  # fmt: skip
    if not rows:
        return ()
    peak = max(rank["peak_rss_bytes"] for rank in ranks)
    held = f"at most {format_bytes(peak)} of host memory in a process, Python and torch included"
    return ("", *_by_rank(["optimizer", "steps", "gradients", "state"], rows, ranks, left=1), held)


def _by_rank(
    header: Sequence[str], rows: Sequence[tuple[Rank, list[str]]], ranks: Sequence[Rank], *, left: int
) -> tuple[str, ...]:
    """A table in which equal rows stand once, with how often they came on each process and on which."""
    places: dict[tuple[str, ...], list[int]] = {}
    for rank, row in rows:
        places.setdefault(tuple(row), []).append(rank["rank"])
    shown = []
    for cells, where in places.items():
        numbers = sorted(set(where))
        on = "all" if len(numbers) == len(ranks) else ", ".join(map(str, numbers))
        times = len(where) // len(numbers)
        shown.append([f"{cells[0]} x{times}" if times > 1 else cells[0], *cells[1:], on])
    return table([*header, "on rank"], shown, left=left)


def _sends(ranks: Sequence[Rank]) -> Check:
    if not ranks or causes(ranks):
        return Check("sends", SENDS, None, "the script did not run to its end" if ranks else "nothing was started")
    windows = [_least(rank["windows"]) for rank in ranks if rank["windows"]]
    if len(windows) < len(ranks):
        why = ranks[0]["no_windows"] or "an optimizer took fewer than three steps"
        return Check("sends", SENDS, None, why)
    mismatches = []
    if any(window["collectives"] != windows[0]["collectives"] for window in windows):
        mismatches.append("the processes counted different collectives")
    if len(ranks) > 1:
        mismatches += _unreduced(ranks[0], windows[0])
    rows = [
        [item["kind"], str(item["group_size"]), str(item["count"]), format_bytes(item["tensor_bytes"]),
         format_bytes(item["sent_bytes"])]
        for item in windows[0]["collectives"]
    ]  # fmt: skip
    sent, number = (sum(item[key] for item in windows[0]["collectives"]) for key in ("sent_bytes", "count"))
    passes = windows[0]["backward_passes"]
    of = "" if passes == 1 else f" of {passes} backward passes"
    summary = f"{number} collectives a step{of}, {format_bytes(sent)} sent by each process" if number else "nothing"
    lines = table(["collective", "of", "number", "whole", "sent by each"], rows)
    return Check("sends", SENDS, not mismatches, summary, tuple(mismatches), lines)


def _least(windows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of several steps the one that sends least: the others evaluate, save or begin an epoch besides."""
    return min(windows, key=lambda window: sum(item["tensor_bytes"] for item in window["collectives"]))


def _unreduced(rank: Rank, window: Mapping[str, Any]) -> list[str]:
    """A step reduces at least the gradients of the smallest model, or the processes learn apart from each other."""
    sizes = [model["trainable_elements"] for model in rank["models"] if model["trainable_elements"]]
    # 16 bits: in a low precision, or by a communication hook of the script's.
    hooks = any(accelerator["given"].get("kwargs_handlers") for accelerator in rank["accelerators"])
    least = min(sizes, default=0) * (2 if hooks or is_low([rank]) else 4)
    reduced = sum(
        item["tensor_bytes"] for item in window["collectives"] if item["kind"] in ("all_reduce", "reduce_scatter")
    )
    if reduced >= least:
        return []
    return [f"a step reduces {reduced:,} bytes, the gradients of a model are {least:,}: processes learn by themselves"]


def _notes(asked: Asked, facts: Mapping[str, Any]) -> list[str]:
    """What the script decides itself, whatever the file says, and what could not be seen."""
    found = [f"could not be seen: {line}" for rank in facts["ranks"] for line in rank.get("unseen", [])]
    environment = facts.get("environment", {})
    for accelerator in facts["ranks"][0].get("accelerators", []) if facts["ranks"] else ():
        given = accelerator["given"]
        for key, variable in _FIELDS.items():
            if given.get(key) is not None:
                file = environment.get(variable, "no" if key == "mixed_precision" else "1")
                instead = "" if str(given[key]) == file else f", not {file} of the file"
                found.append(f"the script sets {key}: {given[key]}{instead}")
        found += [f"the script brings its own {key}, which decides" for key in _PLUGINS if given.get(key)]
    for model in facts["ranks"][0].get("models", []) if facts["ranks"] else ():
        if model["dtypes"] not in ([], ["float32"]):
            found.append(
                f"the script makes {model['class']} in {', '.join(model['dtypes'])}, whatever the precision is"
            )
    return list(dict.fromkeys(found))
