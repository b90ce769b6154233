"""What is to be rehearsed, as the command line said."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_parallel.accelerate_yaml import names_a_file, read_file
from accel_parallel.errors import LaunchError
from accel_parallel.spec import find_spec, read_spec
from accel_parallel.strategies import CATALOGUE, STRATEGIES, find_strategy


@dataclass(frozen=True, slots=True)
class Request:
    """`targets` is empty with `all`. `script` is what stood after `--`."""

    targets: tuple[str, ...]
    all: bool = False
    spec: Path | None = None
    sets: tuple[str, ...] = ()
    num_processes: int | None = None
    keep_precision: bool = False
    junit: Path | None = None
    scale: int | None = None
    script: tuple[str, ...] = ()
    fsdp_in_script: bool = False
    against_ddp: bool = False

    def names(self) -> Sequence[str]:
        """Of the strategies and files. Raises LaunchError for options that do not go together."""
        if bool(self.targets) == self.all:
            raise LaunchError("rehearse what? strategies or accelerate YAML files, or --all for every strategy")
        if self.scale is not None and (self.all or self.num_processes or self.keep_precision):
            raise LaunchError(
                "--scale says how many processes there are, and keeps the precision; it goes with no --all"
            )
        if self.scale is not None and self.script:
            raise LaunchError("--scale simulates the model of the specification, not a script of yours")
        if self.all and self.num_processes is not None:
            raise LaunchError("--all has processes of its own for each strategy", hint="leave --num-processes out")
        for option, given in (("--fsdp-in-script", self.fsdp_in_script), ("--against-ddp", self.against_ddp)):
            if given and not self.script:
                raise LaunchError(f"{option} belongs to a script of yours, which stands after --")
        return [strategy.name for strategy in CATALOGUE] if self.all else self.targets

    def processes(self, name: str) -> int:
        """Over all machines, for one of the names."""
        if name not in STRATEGIES and names_a_file(name):
            file = read_file(Path(name))
            return self.num_processes * file.num_machines if self.num_processes else file.num_processes or 1
        sets = self.sets
        if self.num_processes is not None:
            sets = (*sets, f"distributed.processes_per_machine={self.num_processes}")
        return find_strategy(name).resolve(read_spec(find_spec(self.spec), sets)).num_processes
