"""Rehearsing somebody's script under files, unmodified and with its own arguments."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from accel_parallel.accelerate_yaml import loads, names_a_file, read_file
from accel_parallel.cli.rehearsing.request import Request
from accel_parallel.cli.rehearsing.tasks import Work, carry_out, file_of, found_or_refused, in_order
from accel_parallel.cli.script import check_script, check_sets
from accel_parallel.cli.target import Target, find_to_explain
from accel_parallel.errors import LaunchError
from accel_parallel.rehearsal.check import Rehearsal
from accel_parallel.rehearsal.script import differs, judge_script
from accel_parallel.strategies import STRATEGIES

KINDS = ("NO", "MULTI_GPU", "FSDP", "MULTI_CPU")
PARALLEL_SECTIONS = ("fsdp_config", "parallelism_config")


def rehearse_script(names: Sequence[str], request: Request) -> list[Rehearsal]:
    """One rehearsal for each name. Raises LaunchError where the script cannot be found."""
    check_script(request.script)
    check_sets(request.sets)
    # The specification's batch is of no script, and so need not divide by these processes.
    batches = {name: request.processes(name) for name in names}

    def find(name: str) -> Target:
        return _target(name, batches[name], request)

    found = [found_or_refused(name, find) for name in names]
    targets = [target for target in found if isinstance(target, Target)]
    with tempfile.TemporaryDirectory(prefix="accel-parallel-") as folder:
        return in_order(found, _run(targets, request, Path(folder)))


def _target(name: str, batch_size: int, request: Request) -> Target:
    kind = read_file(Path(name)).kind if name not in STRATEGIES and names_a_file(name) else "FSDP"
    if kind not in KINDS:
        raise LaunchError(f"{name}: distributed_type {kind}: a script is rehearsed on CPUs under {' or '.join(KINDS)}")
    sets = (f"training.batch_size={batch_size}", "training.grad_accum_steps=1", *request.sets)
    return find_to_explain(name, request.spec, sets, request.num_processes, own_model=False)


def _run(targets: Sequence[Target], request: Request, folder: Path) -> list[Rehearsal]:
    works = [_work(target.name, file_of(target), target, request) for target in targets]
    compared = [_under_ddp(work) if request.against_ddp else None for work in works]
    pairs = zip(compared, targets, strict=True)
    ddp = {text: _work("ddp", text, target, request, reference=True) for text, target in pairs if text}
    first, again = folder / "first", folder / "again"
    first.mkdir()
    again.mkdir()
    facts = carry_out([*works, *ddp.values()], first)
    references = {text: [seen] for text, seen in zip(ddp, facts[len(works) :], strict=True)}

    def judged() -> list[Rehearsal]:
        rows = zip(works, facts[: len(works)], compared, strict=True)
        return [judge_script(work.name, work.spec.num_processes, request.script, seen, references.get(text or "", []))
                for work, seen, text in rows]  # fmt: skip

    answers = judged()
    doubtful = {text for answer, text in zip(answers, compared, strict=True) if text and differs(answer)}
    if not doubtful:
        return answers
    # A script that draws new numbers each time is no evidence against a file: a second look at DDP tells.
    for text, seen in zip(doubtful, carry_out([ddp[text] for text in doubtful], again), strict=True):
        references[text].append(seen)
    return judged()


def _work(name: str, config: str, target: Target, request: Request, *, reference: bool = False) -> Work:
    return Work(
        name,
        config,
        target.spec,
        reference=reference,
        keep_precision=request.keep_precision,
        script=request.script,
        fsdp_in_script=request.fsdp_in_script and not reference,
    )


def _under_ddp(work: Work) -> str | None:
    """The same file with replicas instead of shards; None where it has them already."""
    config = loads(work.config)
    if config.get("distributed_type") != "FSDP":
        return None
    kept = {key: value for key, value in config.items() if key not in PARALLEL_SECTIONS}
    kind = "MULTI_GPU" if work.spec.num_processes > 1 else "NO"
    return yaml.safe_dump({**kept, "distributed_type": kind}, sort_keys=False)
