"""From what was seen of somebody's script, from outside, to the answers."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from accel_parallel.asked import Asked
from accel_parallel.metrics import format_bytes, format_processes
from accel_parallel.rehearsal.check import Check, Rehearsal, table
from accel_parallel.rehearsal.configuration import ASKED, is_what_was_asked
from accel_parallel.rehearsal.numbers import SAME, Tolerance, relative
from accel_parallel.rehearsal.sharding import SENDS, SHARDED

RUNS = "does it run to its end?"
FLOAT32 = Tolerance("float32", 1e-5, 1e-3)
LOW = Tolerance("16 bits", 1e-2, 1e-1)
"""By itself Accelerate reduces gradients of bf16 in bf16 under FSDP (run: 2.6e-3 from DDP's autocast in the loss)."""
COMPARED = 8
"""First losses that are compared: rounding grows with every step that follows from it."""
_FIELDS = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
}
_PLUGINS = ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin", "gradient_accumulation_plugin",
            "parallelism_config", "kwargs_handlers", "dynamo_plugin", "cpu")  # fmt: skip

Rank = Mapping[str, Any]


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
        _learns_the_same(asked, ranks, references),
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
    causes = _causes(ranks)
    if causes:
        return Check("runs", RUNS, False, "the script failed", tuple(causes))
    steps = max(rank["optimizer_steps"] for rank in ranks)
    return Check("runs", RUNS, True, f"{steps} optimizer steps, {ranks[0]['backward_passes']} backward passes")


def _causes(ranks: Sequence[Rank]) -> list[str]:
    """What stopped it, without what only follows from that."""
    errors = [rank["error"] for rank in ranks if "error" in rank]
    causes = [error for error in errors if error["code"] != "peer-lost"] or errors
    return sorted({f"{e['message']} ({e['hint']})" if e.get("hint") else e["message"] for e in causes})


def _is_what_was_asked(processes: int, asked: Asked, facts: Mapping[str, Any]) -> Check:
    # What stopped the script is told where it is asked whether it ran.
    told = [{"substitutions": rank.get("substitutions", [])} for rank in facts["ranks"]]
    return is_what_was_asked(processes, asked.fsdp, {**facts, "ranks": told})


def _is_sharded(asked: Asked, ranks: Sequence[Rank]) -> Check:
    seen = [(rank, model) for rank in ranks for model in rank.get("models", []) if model["trainable_elements"]]
    if not seen:
        why = "no model that is trained was prepared"
        alone = asked.fsdp and bool(ranks) and not _causes(ranks)
        return Check("sharded", SHARDED, False if alone else None, why, (f"{why}: nothing is sharded",) if alone else ())
    mismatches = sorted({line for _, model in seen for line in model["mismatches"]})
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
    for row, where in places.items():
        numbers = sorted(set(where))
        on = "all" if len(numbers) == len(ranks) else ", ".join(map(str, numbers))
        times = len(where) // len(numbers)
        shown.append([f"{row[0]} x{times}" if times > 1 else row[0], *row[1:], on])
    return table([*header, "on rank"], shown, left=left)


def _learns_the_same(asked: Asked, ranks: Sequence[Rank], references: Sequence[Mapping[str, Any]]) -> Check:
    """The losses passed to `accelerator.backward`, of each process against the same one under DDP."""
    table_of_losses = _losses(ranks)
    if not references:
        why = "--against-ddp runs the script under DDP too, and compares" if asked.fsdp else "replicas are the reference"
        return Check("same_numbers", SAME, None, why, table=table_of_losses)
    failed = _causes(references[0]["ranks"]) or [references[0]["refused"]]
    if failed[0]:
        return Check("same_numbers", SAME, None, f"under DDP the script fails: {failed[0]}", table=table_of_losses)
    if not ranks or any("error" in rank for rank in ranks):
        return Check("same_numbers", SAME, None, "the script did not run to its end", table=table_of_losses)
    expected = references[0]["ranks"]
    tolerance = LOW if _low(ranks) or _low(expected) else FLOAT32
    apart, line = _apart(ranks, expected)
    number = min(COMPARED, *(len(rank["backward_losses"]) for rank in (*ranks, *expected)))
    if not number:
        return Check("same_numbers", SAME, None, "no loss went through accelerator.backward", table=table_of_losses)
    how = f"within {apart:.0e} of DDP (limit {tolerance.loss:.0e})" if apart else "equal to DDP's bit for bit"
    summary = f"first {number} losses, {tolerance.precision}: {how}"
    if apart <= tolerance.loss:
        return Check("same_numbers", SAME, True, summary, table=table_of_losses)
    if len(references) > 1:
        by_itself, _ = _apart(references[1]["ranks"], expected)
        if by_itself > tolerance.loss:
            why = f"twice under DDP the script's losses are {by_itself:.0e} apart: seed it to compare"
            return Check("same_numbers", SAME, None, why, table=table_of_losses)
    return Check("same_numbers", SAME, False, summary, (line,), table_of_losses)


def _low(ranks: Sequence[Rank]) -> bool:
    dtypes = {dtype for rank in ranks for model in rank.get("models", []) for dtype in model["compute_dtypes"] or ()}
    return bool(dtypes - {"float32", "float64"})


def _apart(ranks: Sequence[Rank], expected: Sequence[Rank]) -> tuple[float, str]:
    """Largest relative difference, and where it is."""
    worst, line = 0.0, ""
    for rank, other in zip(ranks, expected, strict=False):
        pairs = zip(rank["backward_losses"][:COMPARED], other["backward_losses"], strict=False)
        for place, (got, wanted) in enumerate(pairs, start=1):
            # Both may have ended up at no number.
            off = (0.0 if got == wanted else float("inf")) if str in (type(got), type(wanted)) else relative(got, wanted)
            if off > worst:
                worst = off
                line = f"loss {place} on rank {rank['rank']} is {got}, under DDP {wanted}: {off:.1e} apart"
    return worst, line


def _losses(ranks: Sequence[Rank]) -> tuple[str, ...]:
    """What the script logs itself: of each name the first and the last."""
    logged = [entry for rank in ranks for entry in rank.get("logged_losses", [])]
    by_key: dict[str, list[Mapping[str, Any]]] = {}
    for entry in logged:
        by_key.setdefault(entry["key"], []).append(entry)
    rows = [[key, str(len(found)), *(str(found[place]["value"]) for place in (0, -1))] for key, found in by_key.items()]
    return table(["logged by the script", "times", "first", "last"], rows) if rows else ()


def _sends(ranks: Sequence[Rank]) -> Check:
    if not ranks or _causes(ranks):
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
    least = min(sizes, default=0) * (2 if hooks or _low([rank]) else 4)
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
    return list(dict.fromkeys(found))
