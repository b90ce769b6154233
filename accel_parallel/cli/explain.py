"""`accel-parallel explain`: the wrap plan of a strategy or of an accelerate file, without starting processes."""

import json
from dataclasses import dataclass
from pathlib import Path

from accel_parallel.cli.explain_text import other_lines, plan_lines, threshold_lines
from accel_parallel.cli.heavy import heavy_answer
from accel_parallel.cli.target import Target, find_to_explain
from accel_parallel.errors import ModelError, Problem
from accel_parallel.explain import Plan, Step, block_steps, other_version, plan, size_steps
from accel_parallel.output import Result
from accel_parallel.strategies import STRATEGIES
from accel_parallel.units import Model, model_of, transformer_lm


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line said. `model` is a folder or `pkg.module:factory`; None is the project's own."""

    target: str
    spec: Path | None = None
    sets: tuple[str, ...] = ()
    num_processes: int | None = None
    model: str | None = None


def explain(request: Request) -> Result:
    """The plan, the thresholds at which it changes, and what the other version of FSDP would make of the same file.

    Raises SpecError or LaunchError if the target cannot be launched at all, ModelError if there is no such model.
    """
    own = request.model is None
    target = find_to_explain(request.target, request.spec, request.sets, request.num_processes, own_model=own)
    distributed = target.spec.distributed
    world = {"WORLD_SIZE": target.spec.num_processes, "LOCAL_WORLD_SIZE": distributed.processes_per_machine}
    env = target.environment | {key: str(value) for key, value in world.items()}
    model = transformer_lm(target.spec.model.shape) if request.model is None else _foreign(request.model)
    made = plan(env, model, own_loop=own)
    problems = [*(Problem(note, code="explain-note", severity="info") for note in target.notes), *made.problems()]
    data = {"target": target.name, **made.to_dict(), "thresholds": [], "other_version": None}
    lines = plan_lines(target.name, made)
    if made.asked.fsdp:
        steps = _steps(request, target, made)
        other = other_version(env, model, own_loop=own)
        data["thresholds"] = [step.to_dict() for step in steps]
        data["other_version"] = {**other.to_dict(), "problems": [problem.to_dict() for problem in other.problems()]}
        lines += threshold_lines(made, steps) + other_lines(made, other)
    failed = any(problem.severity != "info" for problem in problems)
    return Result(data, lines, problems, 1 if failed else 0)


def _steps(request: Request, target: Target, made: Plan) -> list[Step]:
    """The thresholds that change this target's plan; none where no key of it is a threshold."""
    if made.wrapping.policy == "SIZE_BASED_WRAP":
        return size_steps(made)
    if request.target in STRATEGIES and request.model is None and target.spec.fsdp.wrap == "block":
        return block_steps(made, target.spec.model.shape.block_parameters, target.spec.fsdp.min_num_params)
    return []


def _foreign(name: str) -> Model:
    """The modules of a model of the user's, which a child process builds on torch's meta device. Raises ModelError."""
    printed, code = heavy_answer("model_tree", [name])
    try:
        answer = json.loads(printed)
    except ValueError:
        raise ModelError(f"{name} ended its process while it was built, with exit code {code}") from None
    if "problem" in answer:
        raise ModelError(answer["problem"]["message"], hint=answer["problem"]["hint"])
    return model_of(answer["tree"])
