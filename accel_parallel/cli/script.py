"""A script of the user's own, as it was typed after `--`."""

from pathlib import Path

from accel_parallel.errors import LaunchError
from accel_parallel.spec import Destination, destinations, parse_set


def check_sets(sets: tuple[str, ...]) -> None:
    """Raises LaunchError for an override that does not reach a script: all that does is the accelerate file."""
    carried = {key for key, destination, _ in destinations() if destination is Destination.YAML}
    lost = [key for key, _, problem in map(parse_set, sets) if problem is None and key not in carried]
    if lost:
        message = f"--set {lost[0]} belongs to the training loop, not to a script of yours"
        raise LaunchError(message, hint="a script takes arguments of its own; distributed.* and fsdp.* reach its file")


def check_script(script: tuple[str, ...]) -> None:
    """Raises LaunchError unless it is a file that exists, or -m and a name."""
    if script[:1] == ("-m",) and (len(script) == 1 or script[1].startswith("-")):
        raise LaunchError("-m names no module")
    if script[:1] == ("",):
        raise LaunchError("an empty name is no script")
    if script and script[0] != "-m" and not Path(script[0]).is_file():
        hint = "what stands after -- is a script's path, or -m and a module"
        raise LaunchError(f"{script[0]} is not a file", hint=hint)
