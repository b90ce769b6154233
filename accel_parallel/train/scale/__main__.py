"""`python -m accel_parallel.train.scale`: simulate one process of a large world; the strategy is the environment's."""

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_parallel.arguments import natural, positive
from accel_parallel.errors import AccelParallelError, of_the_system
from accel_parallel.files import write_atomic
from accel_parallel.spec import find_spec, load_spec
from accel_parallel.train.scale import World, simulate

_PER_MACHINE = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate; one line goes to stdout, everything to --out, errors to stderr. Returns the exit code."""
    options = _parser().parse_args(argv)
    # Of torch and Accelerate about addresses and meshes: of no use to anybody who simulates.
    warnings.filterwarnings("ignore")
    try:
        local = options.local_world_size or min(_PER_MACHINE, options.world_size)
        world = World(options.world_size, local, options.rank)
        result = simulate(load_spec(find_spec(options.spec)), world)
        write_atomic(options.out, json.dumps(result, indent=2) + "\n")
    except (AccelParallelError, OSError) as error:
        known = of_the_system(error) if isinstance(error, OSError) else error
        sys.stderr.write(f"error: {known}\n")
        return known.exit_code
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(describe(result) + "\n")
    return 0


def describe(result: dict[str, Any]) -> str:
    """One line for people."""
    shard, peak = result["shard"], result["memory"]["peak"]
    return (
        f"simulated, not run: rank {result['rank']} of {result['world_size']} would hold "
        f"{shard['this_rank'] / 2**30:.3f} GiB of parameters and peak at {peak / 2**30:.2f} GiB"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m accel_parallel.train.scale", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, metavar="FILE", help="the specification")
    parser.add_argument("--world-size", type=positive, required=True, metavar="N", help="processes of the world")
    text = f"processes on each machine (default: {_PER_MACHINE}, or all if there are fewer)"
    parser.add_argument("--local-world-size", type=positive, metavar="N", help=text)
    parser.add_argument("--rank", type=natural, default=0, metavar="R", help="the process to be (default: 0)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the result goes, as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
