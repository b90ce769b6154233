"""What `launch` was asked to start: a strategy of the catalogue, or an accelerate file."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from accel_parallel.accelerate_yaml import AccelerateFile, environment, loads, names_a_file, read_file, render_file
from accel_parallel.accelerate_yaml.values import check_classes, check_values
from accel_parallel.asked import Asked, adapt_spec
from accel_parallel.errors import LaunchError, Problem, SpecError
from accel_parallel.spec import Destination, RunSpec, destinations, find_spec, parse_set, read_spec
from accel_parallel.strategies import STRATEGIES, find_strategy


@dataclass(frozen=True, slots=True)
class Target:
    """The accelerate file to launch, and the specification whose world, precision and sharding are the file's.

    `environment` is what the launcher will export; empty where it cannot be told beforehand.
    """

    name: str
    config: str
    spec: RunSpec
    environment: dict[str, str]
    launcher_arguments: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def find_target(
    target: str, spec: Path | None, sets: tuple[str, ...], num_processes: int | None, *, own_loop: bool
) -> Target:
    """The target that was typed; `num_processes` is on each machine, `own_loop` false for a script of the user's.

    Raises LaunchError or SpecError when it cannot be found, or contradicts the other options.
    """
    if target not in STRATEGIES and names_a_file(target):
        return target_of_file(read_file(Path(target)), spec, sets, num_processes, own_loop)
    return _strategy(target, spec, sets, num_processes, own_loop)


def find_to_explain(
    target: str, spec: Path | None, sets: tuple[str, ...], num_processes: int | None, *, own_model: bool
) -> Target:
    """As `find_target`, for what starts nothing: of a file, too, the environment is told whatever the model is.

    A specification's batch and precision have no part in it, and a class to wrap may be one that is not there.
    """
    if target in STRATEGIES or not names_a_file(target):
        return _strategy(target, spec, sets, num_processes, own_model)
    file = read_file(Path(target))
    _refuse_decided(file, sets)
    machines, processes = _world(file, num_processes)
    exported = _environment(file)
    _check_values(file, classes=False)
    _check_sizes(file, exported, machines * processes)
    found = read_spec(find_spec(spec), sets).resolve().with_world(machines, processes)
    return Target(file.path.stem, file.text, found, exported, notes=(file.ignored,) if file.ignored else ())


def _strategy(
    name: str, spec_path: Path | None, sets: tuple[str, ...], num_processes: int | None, own_loop: bool
) -> Target:
    strategy = find_strategy(name)
    typed = sets
    if num_processes is not None:
        if strategy.overrides.get("distributed.processes_per_machine", num_processes) != num_processes:
            raise LaunchError(f"--num-processes {num_processes}: {name} is one process", hint="use ddp or fsdp")
        sets = (*sets, f"distributed.processes_per_machine={num_processes}")
    draft = read_spec(find_spec(spec_path), sets)
    spec, raised = strategy.resolve(draft), strategy.raised(draft)
    strategy.refuse_contradictions(typed)
    if raised and num_processes is not None:
        raise LaunchError(raised, hint="leave --num-processes out, or set distributed.num_machines")
    notes = [*([raised] if raised else []), *strategy.without_effect(typed)]
    config = render_file(spec, strategy, source="spec.yaml", foreign=not own_loop)
    return Target(name, config, spec, environment(loads(config)), notes=tuple(notes))


def target_of_file(
    file: AccelerateFile, spec_path: Path | None, sets: tuple[str, ...], num_processes: int | None, own_loop: bool
) -> Target:
    """As `find_target`, of a file that was read."""
    _refuse_decided(file, sets)
    spec = read_spec(find_spec(spec_path), sets).resolve()
    machines, processes = _world(file, num_processes)
    spec = spec.with_world(machines, processes)
    exported: dict[str, str] = {}
    if own_loop:
        exported = _environment(file)
        _check_values(file)
        _check_sizes(file, exported, machines * processes)
        world = {"WORLD_SIZE": str(machines * processes), "LOCAL_WORLD_SIZE": str(processes)}
        spec = adapt_spec(spec, Asked.from_environment({**exported, **world}))
    found = {"main_process_ip": file.main_process_ip, "main_process_port": file.main_process_port}
    address = {key: value for key, value in found.items() if value is not None}
    spec = spec.model_copy(update={"distributed": spec.distributed.model_copy(update=address)})
    arguments = ("--num_processes", str(machines * processes)) if num_processes is not None else ()
    notes = (file.ignored,) if file.ignored else ()
    return Target(file.path.stem, file.text, spec, exported, arguments, notes)


def _refuse_decided(file: AccelerateFile, sets: tuple[str, ...]) -> None:
    carried = {key for key, destination, _ in destinations() if destination is Destination.YAML}
    decided = [key for key, _, problem in map(parse_set, sets) if problem is None and key in carried]
    if decided:
        hint = "edit the file, or launch a strategy"
        raise SpecError([Problem(f"is decided by {file.path}", path=f"--set {key}", hint=hint) for key in decided])


def _environment(file: AccelerateFile) -> dict[str, str]:
    try:
        return environment(file.config)
    except LaunchError as error:
        raise LaunchError(f"{file.path}: {error.message}", hint=error.hint) from None


def _check_sizes(file: AccelerateFile, exported: dict[str, str], total: int) -> None:
    """The dimensions of parallelism_config have to fill the world: Accelerate says so only in the workers."""
    sizes = [int(size) for key, size in exported.items() if re.fullmatch(r"PARALLELISM_CONFIG_\w+_SIZE", key)]
    replicas = int(exported.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))
    if file.kind == "FSDP" and replicas > 1 and exported["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "1":
        message = "parallelism_config leaves nothing to shard over: parallelism_config_dp_shard_size is 1"
        raise LaunchError(f"{file.path}: {message}", hint="distributed_type MULTI_GPU only replicates")
    if math.prod(sizes) not in (1, total):
        message = f"the sizes of parallelism_config multiply to {math.prod(sizes)}, not to {total} processes"
        raise LaunchError(f"{file.path}: {message}")


def _check_values(file: AccelerateFile, *, classes: bool = True) -> None:
    section = file.config.get("fsdp_config")
    if file.kind == "FSDP" and isinstance(section, dict):
        values = {key if str(key).startswith("fsdp") else f"fsdp_{key}": section[key] for key in section}
        try:
            check_values(values)
            if classes:
                check_classes(values)
        except LaunchError as error:
            raise LaunchError(f"{file.path}: {error.message}", hint=error.hint) from None


def _world(file: AccelerateFile, num_processes: int | None) -> tuple[int, int]:
    """Machines, and processes on each."""
    machines = file.num_machines
    if file.kind == "NO" and machines > 1:
        raise LaunchError(f"{file.path}: distributed_type 'NO' is one process, num_machines is {machines}")
    if file.kind == "NO" and num_processes not in (None, 1):
        raise LaunchError(f"--num-processes {num_processes}: {file.path} is of distributed_type 'NO', one process")
    if num_processes is not None:
        total = machines * num_processes
    elif file.num_processes is None:
        raise LaunchError(f"{file.path} has no num_processes", hint="add it, or pass --num-processes")
    else:
        total = file.num_processes
    if total % machines or total < machines:
        below, above = total // machines * machines, (total // machines + 1) * machines
        nearest = f"{below} or {above}" if below else f"{above}"
        raise LaunchError(
            f"{file.path}: num_processes {total} is the total over {machines} machines, which cannot share it evenly",
            hint=f"nearest that do: {nearest}",
        )
    if file.kind == "MULTI_CPU" and total > 1:
        raise LaunchError(
            f"{file.path}: under MULTI_CPU Accelerate starts one process of {total} unless mpirun starts them",
            hint="MULTI_GPU and FSDP run on CPU processes here",
        )
    return machines, total // machines
