"""`python -m accel_parallel.train.script [options] -- SCRIPT ARGS`: a script of the user's under the launch's YAML.

On accelerators nothing is changed. Without any, every `Accelerator` that the script makes is really parallel on CPU
processes, with the script's own plugins, precision and accumulation.
"""

import argparse
import atexit
import importlib.util
import os
import runpy
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from accel_parallel.asked import Asked
from accel_parallel.errors import LaunchError, Problem
from accel_parallel.say import say
from accel_parallel.substitutions import Substitution
from accel_parallel.train.status import end_process, open_status


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    status = open_status(arguments.status_dir)
    status.control.step = None
    code = 0

    def body() -> None:
        nonlocal code
        enter_launch(arguments.cpu, arguments.keep_precision, fsdp_in_script=arguments.fsdp_in_script)
        try:
            run(arguments.script, arguments.arguments, as_module=arguments.module)
        except SystemExit as end:
            said = not (end.code is None or isinstance(end.code, int))
            code = status.failed(1, [Problem(str(end.code), code="script")]) if said else int(end.code or 0)

    return status.run(body) or code


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m accel_parallel.train.script", description=__doc__)
    result.add_argument("--cpu", action="store_true", help="use CPUs even where there are accelerators")
    result.add_argument("--keep-precision", action="store_true", help="on CPU, compute in the asked precision")
    text = "on CPU, let a plugin that the script passes shard, although the launch does not ask for FSDP"
    result.add_argument("--fsdp-in-script", action="store_true", help=text)
    result.add_argument("--module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    result.add_argument("--status-dir", type=Path, help=argparse.SUPPRESS)
    result.add_argument("script", metavar="SCRIPT")
    result.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS")
    return result


def enter_launch(
    force_cpu: bool, keep_precision: bool, *, fsdp_in_script: bool = False, quiet: bool = False
) -> list[Substitution]:
    """Join the launch, as the script's first `Accelerator` would, if it has to be done differently on CPUs.

    Returns what is done differently; a plugin that the script builds later may add to the list.
    """
    from accel_parallel.train.runtime import cpu
    from accel_parallel.train.runtime.join import enter, join

    asked = Asked.from_environment(os.environ)
    changed = enter(asked, force_cpu=force_cpu, keep_precision=keep_precision)
    if changed is None:
        return []
    said: list[Substitution] = []

    def tell(item: Substitution) -> None:
        if item not in said:
            said.append(item)
            if not quiet and os.environ.get("RANK", "0") == "0":
                say(f"on CPU: {item}")

    join(asked, True, {}, tell)
    cpu.keep_process_groups()
    cpu.meet_plugin_of_script(asked, fsdp_in_script, tell)
    for item in changed:
        tell(item)
    return said


def run(script: str, arguments: Sequence[str], *, as_module: bool) -> None:
    """Run a script, or a module, as the main program. What it raises goes through, SystemExit too."""
    if as_module:
        sys.path.insert(0, str(Path.cwd()))
        if not _is_module(script):
            raise LaunchError(f"there is no module {script!r} in this environment or folder")
    elif not Path(script).is_file():
        raise LaunchError(f"{script} is not a file", hint="the script's path, or -m and a module")
    elif b"\0" in Path(script).read_bytes()[:4096]:
        raise LaunchError(f"{script} is not a Python script")
    sys.argv = [script, *arguments]
    # As Python itself does: modules beside the script are found first, or those of the current folder.
    sys.path[0] = str(Path.cwd() if as_module else Path(script).resolve().parent)
    if as_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package it is in
        return False


def finish(code: int) -> None:
    """What the interpreter does at its end, without freeing process groups: see `end_process`."""
    wind_up(code)
    end_process(code)


def wind_up(code: int) -> None:
    """Wait for the script's threads, and call what it wants called at the end."""
    for thread in threading.enumerate() if code == 0 else ():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()


if __name__ == "__main__":
    finish(main())
