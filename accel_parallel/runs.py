"""Run directories: which one a launch continues, and what it finds there.

A run is `runs/<strategy>-<NNN>/` with `spec.yaml`, `accelerate.yaml`, `metrics.jsonl`, `environment.json`,
`summary.json` and `checkpoints/step-<NNNNNNNN>/`. Nothing complete is removed here.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from accel_parallel.checkpoints import PARTIAL, REMOVED
from accel_parallel.continuing import Change, Effect, changes
from accel_parallel.errors import RunError, SpecError
from accel_parallel.files import write_atomic
from accel_parallel.spec import RunSpec, dump_spec, load_spec
from accel_parallel.suggest import did_you_mean

ROOT = Path("runs")
_NUMBERED = re.compile(r"-(\d{3,})$")


@dataclass(frozen=True)
class Run:
    """A directory that holds this specification, new or to be continued."""

    path: Path
    continues: bool
    note: str | None = None
    changes: tuple[Change, ...] = ()
    """What is asked for differently than when it ran last."""

    @property
    def told_changes(self) -> list[str]:
        """Those that somebody who continues it should know of, such as `fsdp.version 2 -> 1`."""
        return [str(change) for change in self.changes if change.effect is not Effect.NONE]

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"


def open_run(
    spec: RunSpec,
    strategy: str,
    *,
    root: Path = ROOT,
    explicit: Path | None = None,
    fresh: bool = False,
    claim: Callable[[Path], None] = lambda path: None,
) -> Run:
    """The directory this launch writes to, created with its `spec.yaml` if it is new.

    `explicit` names one, which may hold a run of another strategy, and of another specification as far as it can go on
    (`continuing`); otherwise the newest run of `strategy` whose deciding keys are equal is continued, and `fresh` or a
    different specification takes the next number. `claim` is called with the directory before anything is written into
    it. Raises RunError when the named directory holds a run that cannot go on with this specification, or cannot be
    written.
    """
    run = _explicit(spec, explicit, fresh) if explicit is not None else _next(spec, strategy, root, fresh)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        claim(run.path)
        run = replace(run, changes=_changes(run.path, spec)) if run.continues else run
        write_atomic(run.path / "spec.yaml", dump_spec(spec))
    except OSError as error:
        raise _not_writable(run.path, error) from None
    return run


def require_run(path: Path) -> None:
    """Raises RunError naming the runs beside it, unless `path` is a run directory."""
    if (path / "spec.yaml").is_file():
        return
    near = sorted(str(spec.parent) for spec in {*path.parent.glob("*/spec.yaml"), *ROOT.glob("*/spec.yaml")})
    hint = f"there are {', '.join(near[-5:])}" if near else "a run is a directory such as runs/fsdp-001"
    raise RunError(f"{path} is not a run directory{did_you_mean(str(path), near)}", hint=hint)


def continued_by(spec: RunSpec, strategy: str, *, explicit: Path | None = None, fresh: bool = False) -> Path | None:
    """The directory that `open_run` would continue, None if it would start one. Nothing is written."""
    if explicit is not None or fresh:
        return explicit
    return next((path for path in reversed(_numbered(ROOT, strategy)) if not _differences(path, spec)), None)


def _next(spec: RunSpec, strategy: str, root: Path, fresh: bool) -> Run:
    existing = _numbered(root, strategy)
    note = None
    if not fresh:
        for path in reversed(existing):
            differences = _differences(path, spec)
            if not differences:
                return Run(path, continues=True)
            note = note or f"{path} holds another specification ({'; '.join(differences)}): starting a new run"
    last = int(_NUMBERED.search(existing[-1].name)[1]) if existing else 0  # type: ignore[index]
    return _create(root, strategy, last + 1, note)


def _explicit(spec: RunSpec, path: Path, fresh: bool) -> Run:
    if not (path / "spec.yaml").exists():
        if path.exists() and not (path.is_dir() and all(entry.name.startswith(".") for entry in path.iterdir())):
            raise RunError(f"{path} is not a run directory and not empty", hint="name a new directory with --run")
        return Run(path, continues=False)
    if fresh:
        raise RunError(
            f"{path} already holds a run, and nothing is overwritten", hint="name a new directory with --run"
        )
    try:
        before = load_spec(path / "spec.yaml")
    except SpecError:
        raise RunError(f"{path}: its spec.yaml cannot be read", hint="name a new directory with --run") from None
    refused = [change for change in changes(before.flat(), spec) if change.effect.refused]
    if refused:
        why = "; ".join(f"{change}: {change.effect.value}" for change in refused)
        raise RunError(f"{path} cannot go on with {why}", hint="--fresh without --run starts a new run directory")
    return Run(path, continues=True)


def _create(root: Path, strategy: str, number: int, note: str | None) -> Run:
    while True:
        path = root / f"{strategy}-{number:03d}"
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            number += 1
        except OSError as error:
            raise _not_writable(path, error) from None
    return Run(path, continues=False, note=note)


def _not_writable(path: Path, error: OSError) -> RunError:
    return RunError(f"cannot write to {path}: {error.strerror}", hint="name another directory with --run")


def _numbered(root: Path, strategy: str) -> list[Path]:
    """Existing directories of this strategy, oldest number first."""
    named = (path for path in root.glob("*") if path.name.startswith(strategy))
    found = [path for path in named if _NUMBERED.fullmatch(path.name.removeprefix(strategy))]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def _differences(path: Path, spec: RunSpec) -> list[str]:
    try:
        return load_spec(path / "spec.yaml").identity_differences(spec)
    except SpecError:
        return ["its spec.yaml cannot be read"]


def _changes(path: Path, spec: RunSpec) -> tuple[Change, ...]:
    try:
        return tuple(changes(load_spec(path / "spec.yaml").flat(), spec))
    except SpecError:
        return ()


def discard_partial_checkpoints(run: Path) -> None:
    """Remove what a save or a removal that never ended left behind: hidden directories that nothing else reads."""
    for prefix in (PARTIAL, REMOVED):
        for path in (run / "checkpoints").glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)
