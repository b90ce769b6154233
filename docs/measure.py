"""Measures one step of every strategy on this machine, in real processes: `just measure-strategies`.

Writes `docs/strategies.json`. Float32 on CPU processes, the `tiny` preset, the same micro-batch in each process,
launched by Accelerate from the YAML that the catalogue renders. A strategy that fails is told and left out.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accel_parallel.accelerate_yaml import render_file
from accel_parallel.launch import launcher_environment
from accel_parallel.spec import Draft, RunSpec, dump_spec, load_spec, read_spec
from accel_parallel.strategies import CATALOGUE, Strategy
from accel_parallel.train.pool import free_port

RESULT = Path(__file__).parent / "strategies.json"
SEQUENCES = 4
TIMEOUT_SECONDS = 180


def main() -> int:
    measured: dict[str, Any] = {}
    for strategy in CATALOGUE:
        try:
            measured[strategy.name] = measure(strategy)
            sys.stderr.write(f"measured  {strategy.name}\n")
        except RuntimeError as error:
            sys.stderr.write(f"left out  {strategy.name}: {error}\n")
    spec = resolved(CATALOGUE[0])
    content = {
        "versions": {name: version(name) for name in ("torch", "accelerate")},
        "model": {
            "preset": "tiny",
            "parameters": spec.model.shape.total_parameters,
            "sequences_per_process": SEQUENCES,
            "seq_len": spec.model.seq_len,
        },
        "strategies": measured,
    }
    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if len(measured) == len(CATALOGUE) else 1


def resolved(strategy: Strategy) -> RunSpec:
    """The strategy on the fewest processes that show it, with as many sequences in each whatever their number."""
    processes = strategy.resolve(_draft(processes=4)).num_processes
    return strategy.resolve(_draft(processes))


def _draft(processes: int) -> Draft:
    return read_spec(None, [f"training.batch_size={SEQUENCES * processes}", "distributed.main_process_ip=127.0.0.1"])


def measure(strategy: Strategy) -> dict[str, Any]:
    """Raises RuntimeError with the last words of the processes that failed."""
    spec = resolved(strategy)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "accelerate.yaml").write_text(render_file(spec, strategy), encoding="utf-8")
        (folder / "spec.yaml").write_text(dump_spec(spec), encoding="utf-8")
        launch(folder, spec)
        ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    if any(rank["traffic"] != ranks[0]["traffic"] for rank in ranks):
        raise RuntimeError("the ranks counted different collectives")
    machines, processes = spec.distributed.num_machines, spec.distributed.processes_per_machine
    return {
        "processes": f"{machines} x {processes}" if machines > 1 else str(processes),
        "traffic": ranks[0]["traffic"],
        "memory": {key: max(rank["memory"][key] for rank in ranks) for key in ranks[0]["memory"]},
    }


def launch(folder: Path, spec: RunSpec) -> None:
    """One `accelerate launch` for each machine, all of them this one."""
    port = str(free_port())
    launchers = []
    for machine in range(spec.distributed.num_machines):
        where = ["--machine_rank", str(machine)] if spec.distributed.num_machines > 1 else []
        command = [
            sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(folder / "accelerate.yaml"),
            *where, "--main_process_port", port, __file__, "--worker", str(folder),
        ]  # fmt: skip
        # The profiler's own log would drown what a failing process has to say.
        environment = {**launcher_environment(os.environ, spec.num_processes), "KINETO_LOG_LEVEL": "99"}
        with (folder / f"log-{machine}.txt").open("w") as log:
            launchers.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    codes = []
    try:
        codes = [launcher.wait(TIMEOUT_SECONDS) for launcher in launchers]
    except subprocess.TimeoutExpired:
        codes = [1]
    finally:
        for launcher in launchers:
            launcher.terminate()  # does nothing to one that has ended
            launcher.wait()
    if any(codes) or len(list(folder.glob("rank-*.json"))) != spec.num_processes:
        logs = "".join(path.read_text() for path in sorted(folder.glob("log-*.txt")))
        errors = [line for line in logs.splitlines() if "Error" in line and "ChildFailedError" not in line]
        raise RuntimeError(errors[-1] if errors else f"no answer in {TIMEOUT_SECONDS} s")


def worker(folder: Path) -> None:
    """What every launched process runs."""
    import torch

    from accel_parallel.train.agent import die_with_parent
    from accel_parallel.train.model import TransformerLM
    from accel_parallel.train.optimize import build_optimizer
    from accel_parallel.train.probe import observe_step
    from accel_parallel.train.runtime import Runtime
    from accel_parallel.train.training_step import training_step

    die_with_parent(signal.SIGKILL)
    spec = load_spec(folder / "spec.yaml")
    runtime = Runtime.start(spec, force_cpu=True)
    fresh = TransformerLM(spec.model)
    if runtime.fills_weights():
        fresh.init_weights(spec.training.seed)
    generator = torch.Generator().manual_seed(runtime.rank)
    tokens, labels = torch.randint(spec.model.vocab_size, (2, SEQUENCES, spec.model.seq_len), generator=generator)
    model, optimizer = runtime.prepare(fresh, build_optimizer(fresh, spec.training), tokens, labels)

    step = training_step(runtime, model, optimizer, tokens, labels)

    cost = observe_step(model, optimizer, step)
    (folder / f"rank-{runtime.rank:02d}.json").write_text(json.dumps(cost.to_dict()), encoding="utf-8")
    runtime.end()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]))
        os._exit(0)  # not sys.exit: a gloo group that is freed may hang (see the runtime)
    sys.exit(main())
