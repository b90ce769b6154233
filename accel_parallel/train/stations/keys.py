"""The keys of a file, each against copies of the file in which only its value is another."""

import copy
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from accel_parallel.errors import LaunchError
from accel_parallel.suggest import closest
from accel_parallel.train.stations.launcher import NOT_SET, Launch, launch, launched
from accel_parallel.train.stations.perturb import PREFIXES, alternatives, options, read_as
from accel_parallel.train.stations.pretend import in_one_line
from accel_parallel.train.stations.worker import state_of

NEVER_LEAVES = "never leaves the file"
UNREAD = "reaches the environment, and nothing reads it there"
# Which keys deepspeed_config has, whatever they say: DeepSpeedPlugin looks here for keys given twice.
_NAMES_OF_KEYS = "ACCELERATE_CONFIG_DS_FIELDS"
_Keys = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Station:
    """What becomes of one key."""

    key: str
    """With its section: `fsdp_config.fsdp_version`."""
    asked: str
    """Its value, as YAML."""
    environment: dict[str, str]
    """The launcher's variables and options that another value changes, as the file has them."""
    state: dict[str, str]
    """What of Accelerate's state in a worker another value changes, as the file has it."""
    dead: bool
    """No other value changes which processes are started, or their state; nor does leaving the key out."""
    where: str
    """How far a dead key comes. Of a living one that is seen only by a refusal, the refusal."""
    meant: str
    """The key that a dead one was probably meant to be; empty if there is none like it."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Outcome:
    launch: Launch | None
    state: dict[str, str]
    error: str


def stations(config: Path) -> list[Station]:
    """Every key of the file, in its order.

    Raises LaunchError where Accelerate's launcher refuses the file as a whole. Where only its plugins do, in every
    worker, a key that reaches the environment is not called dead: nobody can tell.
    """
    started = launched(config)
    state = state_of(started.in_worker)
    base = _Outcome(started, state, state.get("error", ""))
    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / "config.json"
        try:
            _write(content, scratch)
        except (ValueError, RecursionError):
            raise LaunchError(f"{config} holds itself: an anchor that its own mapping refers to") from None
        return [_station(content, keys, base, scratch) for keys in _keys_of(content)]


def _keys_of(content: dict[Any, Any]) -> Iterator[_Keys]:
    """The launcher looks into sections, and no deeper."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from ((key, inner) for inner in value)
        else:
            yield (key,)


def _station(content: dict[Any, Any], keys: _Keys, base: _Outcome, scratch: Path) -> Station:
    environment: dict[str, str] = {}
    refused: tuple[str, dict[str, str], dict[str, str]] | None = None
    for other in _perturbed(content, keys):
        outcome = _outcome(other, scratch)
        reached = _reached(base, outcome)
        changed = _changed(base.state, outcome.state, only_common=base.error != outcome.error)
        if outcome.error not in ("", base.error):
            # A value that is refused was read; one that is accepted tells more.
            refused = refused or (outcome.error, reached, changed)
        elif changed or outcome.error != base.error or _started_otherwise(base, outcome):
            return _result(content, keys, reached, changed, dead=False)
        else:
            environment = environment or reached
    # Where an accepted value changes nothing, the refusal is of what Accelerate checks and then drops.
    if refused and not environment:
        return _result(content, keys, *refused[1:], dead=False, where=f"another value is refused: {refused[0]}")
    if environment and base.error:
        return _result(content, keys, environment, {}, dead=False, where=f"Accelerate fails as it is: {base.error}")
    return _result(content, keys, environment, {}, dead=True, where=UNREAD if environment else NEVER_LEAVES)


def _result(
    content: dict[Any, Any],
    keys: _Keys,
    environment: dict[str, str],
    state: dict[str, str],
    *,
    dead: bool,
    where: str = "",
) -> Station:
    asked = yaml.safe_dump(_at(content, keys), default_flow_style=True, width=1000).removesuffix("...\n").strip()
    meant = _meant(keys) if dead else ""
    return Station(".".join(map(str, keys)), asked, environment, state, dead, where, meant)


def _meant(keys: _Keys) -> str:
    if len(keys) != 2 or keys[0] not in PREFIXES:
        return ""
    section, key = str(keys[0]), str(keys[1])
    known = options(section)
    if read_as(section, key) in known:
        return ""
    # Without the prefix, in which all of them are alike.
    prefix = PREFIXES[section]
    word = closest(key.removeprefix(prefix), [name.removeprefix(prefix) for name in known])
    return word and prefix + word


def _perturbed(content: dict[Any, Any], keys: _Keys) -> Iterator[dict[Any, Any]]:
    """The file with other values of one key, and without it."""
    section = str(keys[0]) if len(keys) > 1 else ""
    for value in alternatives(section, str(keys[-1]), _at(content, keys)):
        other = copy.deepcopy(content)
        _at(other, keys[:-1])[keys[-1]] = value
        yield other
    other = copy.deepcopy(content)
    holder = _at(other, keys[:-1])
    del holder[keys[-1]]
    if section and not holder:
        holder["unread"] = 0  # that there is a section at all is not this key's doing
    yield other


def _outcome(content: dict[Any, Any], scratch: Path) -> _Outcome:
    _write(content, scratch)
    try:
        started = launch(scratch)
    except LaunchError as error:
        return _Outcome(None, {}, error.message)
    except Exception as error:  # as Accelerate comes to raise it
        return _Outcome(None, {}, in_one_line(error))
    state = state_of(started.in_worker)
    return _Outcome(started, state, state.get("error", ""))


def _write(content: dict[Any, Any], scratch: Path) -> None:
    """As JSON, which Accelerate takes as well and reads much faster."""
    scratch.write_text(json.dumps(content, default=str, skipkeys=True), encoding="utf-8")


def _started_otherwise(base: _Outcome, outcome: _Outcome) -> bool:
    return base.launch is None or outcome.launch is None or base.launch.command != outcome.launch.command


def _reached(base: _Outcome, outcome: _Outcome) -> dict[str, str]:
    if base.launch is None or outcome.launch is None:
        return {}
    command, other = base.launch.command, outcome.launch.command
    if command["launcher"] != other["launcher"]:  # each has options of its own, which are nobody's choice
        command, other = ({"launcher": options["launcher"]} for options in (command, other))
    changed = _changed({**command, **base.launch.environment}, {**other, **outcome.launch.environment})
    return {name: value for name, value in changed.items() if name != _NAMES_OF_KEYS}


def _changed(base: dict[str, str], other: dict[str, str], *, only_common: bool = False) -> dict[str, str]:
    """What of `base` differs; what one of them lacks counts, unless an error has cut it short."""
    names = [*base, *(name for name in other if name not in base)]
    if only_common:
        names = [name for name in base if name in other]
    return {name: base.get(name, NOT_SET) for name in names if name != "error" and base.get(name) != other.get(name)}


def _at(content: Any, keys: _Keys) -> Any:
    for key in keys:
        content = content[key]
    return content
