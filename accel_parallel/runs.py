"""Run directories: which one a launch continues, and what it finds there.

A run is `runs/<strategy>-<NNN>/` with `spec.yaml`, `accelerate.yaml`, `metrics.jsonl`, `environment.json`,
`summary.json` and `checkpoints/step-<NNNNNNNN>/`. Nothing complete is removed here.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from accel_parallel.errors import RunError, SpecError
from accel_parallel.files import write_atomic
from accel_parallel.spec import RunSpec, dump_spec, load_spec

ROOT = Path("runs")
_NUMBERED = re.compile(r"-(\d{3,})$")
_STEP = re.compile(r"step-(\d{8,})$")
MANIFEST = "manifest.json"
STATE = {"step", "samples", "tokens"}
"""What a manifest says of where training is: optimizer steps done, sequences and tokens seen."""


@dataclass(frozen=True)
class Run:
    """A directory that holds this specification, new or to be continued."""

    path: Path
    continues: bool
    note: str | None = None
    changes: tuple[str, ...] = ()
    """What of its layout is asked for differently than when it ran last, such as `fsdp.version 2 -> 1`."""

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

    `explicit` names one, which may hold a run of another strategy; otherwise the newest run of `strategy` whose
    deciding keys are equal is continued, and `fresh` or a different specification takes the next number. `claim` is
    called with the directory before anything is written into it.
    Raises RunError when the named directory holds a run of another specification, or cannot be written.
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
    differences = _differences(path, spec)
    if differences:
        raise RunError(
            f"{path} holds another specification: {'; '.join(differences)}",
            hint="--fresh without --run starts a new run directory",
        )
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


def _changes(path: Path, spec: RunSpec) -> tuple[str, ...]:
    """Keys that decide how the run is spread over processes; they may change when it is continued."""
    try:
        before, now = load_spec(path / "spec.yaml").flat(), spec.flat()
    except SpecError:
        return ()
    layout = ("distributed.num_machines", "distributed.processes_per_machine")
    keys = [key for key in now if key in layout or key.startswith("fsdp.")]
    return tuple(f"{key} {before[key]} -> {now[key]}" for key in keys if before[key] != now[key])


def complete_checkpoints(run: Path) -> dict[int, Path]:
    """Complete checkpoints by step, oldest first: those whose manifest can be read and whose files have its sizes."""
    found = {}
    for path in (run / "checkpoints").glob("step-*"):
        match = _STEP.fullmatch(path.name)
        if match and _is_complete(path):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def damaged_checkpoints(run: Path) -> list[Path]:
    """Directories that look like checkpoints newer than the newest complete one, and are not complete."""
    newest = next(reversed(complete_checkpoints(run)), -1)
    steps = ((path, _STEP.fullmatch(path.name)) for path in sorted((run / "checkpoints").glob("step-*")))
    return [path for path, match in steps if match and int(match[1]) > newest]


def discard_partial_checkpoints(run: Path) -> None:
    """Remove what a save that never ended left behind: hidden directories that nothing else reads."""
    for path in (run / "checkpoints").glob(".partial-*"):
        shutil.rmtree(path, ignore_errors=True)


def _is_complete(checkpoint: Path) -> bool:
    manifest = read_manifest(checkpoint) or {}
    files, state = manifest.get("files"), manifest.get("state")
    if not isinstance(files, dict) or not files or not isinstance(state, dict) or "data" not in manifest:
        return False
    if set(state) != STATE or not all(type(count) is int and count >= 0 for count in state.values()):
        return False
    if checkpoint.name != f"step-{state['step']:08d}":
        return False
    try:
        return all((checkpoint / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError):  # a name may be anything
        return False


def newest_checkpoint(run: Path) -> Path | None:
    return next(reversed(complete_checkpoints(run).values()), None)


def newest_step(run: Path) -> int:
    """Optimizer steps in the newest complete checkpoint, 0 if there is none."""
    return next(reversed(complete_checkpoints(run)), 0)


def read_manifest(checkpoint: Path) -> dict[str, object] | None:
    """What a checkpoint says about itself, or None if it does not say anything readable."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None
