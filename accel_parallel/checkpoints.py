"""What checkpoints a run has: which are complete, which are damaged and how.

A checkpoint is `checkpoints/step-<NNNNNNNN>/`: the files of torch.distributed.checkpoint, and a manifest, written last,
that names each of them with its size and digest. Nothing here writes, and nothing outside of the directory is read.
"""

import hashlib
import json
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

FORMAT: Literal[2] = 2
MANIFEST = "manifest.json"
PARTIAL, REMOVED = ".partial-", ".removed-"
"""What a save that has not ended, and a removal that has not ended, are called: hidden, and read by nobody."""
_STEP = re.compile(r"step-(\d{8,})$")


class _DamageError(ValueError):
    """Its text says what is wrong with the manifest."""


FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,200}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Natural = Annotated[int, Field(ge=0)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Stored(_Frozen):
    """One file: its size in bytes, and the SHA-256 of its content in hexadecimal."""

    bytes: Natural
    sha256: Sha256


class State(_Frozen):
    """Optimizer steps done; sequences and tokens seen over all processes."""

    step: Natural
    samples: Natural
    tokens: Natural


class Manifest(_Frozen):
    """What a checkpoint says about itself. `data` is the fingerprint of the tokens, `written` seconds since 1970."""

    format: Literal[2]
    state: State
    strategy: str
    world_size: Annotated[int, Field(ge=1)]
    data: str
    files: Annotated[dict[FileName, Stored], Field(min_length=1)]
    versions: dict[str, str]
    spec: dict[str, dict[str, Any]]
    written: float

    def dumps(self) -> str:
        """The file's text, which carries a digest of itself."""
        content = self.model_dump(mode="json")
        return json.dumps({**content, "sha256": _digest_of(content)}, indent=1) + "\n"

    @classmethod
    def loads(cls, text: str) -> Self:
        """Raises ValueError when it is not what `dumps` wrote."""
        content = json.loads(text)
        if not isinstance(content, dict) or "format" not in content:
            raise _DamageError("is not one of this program")
        if content["format"] != FORMAT:
            raise _DamageError(f"has format {_shown(str(content['format']))}, this version reads {FORMAT}")
        if content.pop("sha256", None) != _digest_of(content):
            raise _DamageError("was changed after it was written")
        return cls.model_validate(content)

    @property
    def flat_spec(self) -> dict[str, Any]:
        """The specification of the run that saved it, as `section.key`."""
        return {f"{section}.{key}": value for section, keys in self.spec.items() for key, value in keys.items()}


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory that is named like a checkpoint. `damage` says why it is not used; else there is a `manifest`."""

    path: Path
    step: int
    manifest: Manifest | None = None
    damage: str | None = None

    @property
    def bytes(self) -> int:
        """Size of its files, without the manifest; 0 if that is not known."""
        return sum(file.bytes for file in self.manifest.files.values()) if self.manifest else 0


def list_checkpoints(run: Path) -> list[Checkpoint]:
    """Every checkpoint of a run, oldest first, looked at without reading its files."""
    named = ((path, _STEP.fullmatch(path.name)) for path in (run / "checkpoints").glob("step-*"))
    return sorted((_look(path, int(match[1])) for path, match in named if match), key=lambda found: found.step)


def complete_checkpoints(run: Path) -> dict[int, Path]:
    """Those that are not damaged, by step, oldest first."""
    return {found.step: found.path for found in list_checkpoints(run) if found.damage is None}


def newest_checkpoint(run: Path) -> Path | None:
    return next(reversed(complete_checkpoints(run).values()), None)


def newest_step(run: Path) -> int:
    """Optimizer steps in the newest complete checkpoint, 0 if there is none."""
    return next(reversed(complete_checkpoints(run)), 0)


def wrong_digest(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> str | None:
    """Read the files, or those of `names`, and say which one is not what was written; None if all are."""
    assert checkpoint.manifest is not None
    for name in checkpoint.manifest.files if names is None else names:
        try:
            digest = sha256_of(checkpoint.path / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if digest != checkpoint.manifest.files[name].sha256:
            return f"{name} is not what was written: its digest differs"
    return None


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _look(path: Path, step: int) -> Checkpoint:
    """Sizes and names against the manifest. A link may lead anywhere, so none is followed."""
    manifest = None
    try:
        if path.is_symlink() or not path.is_dir():
            return Checkpoint(path, step, damage="is not a directory")
        damage = _odd(path / MANIFEST)
        if damage is None:
            manifest = Manifest.loads((path / MANIFEST).read_text(encoding="utf-8"))
            damage = _contradiction(path, step, manifest)
    except OSError as error:
        damage = f"cannot be read: {error.strerror}"
    except ValidationError as error:
        found = error.errors()[0]
        damage = f"{MANIFEST} is damaged: {_shown('.'.join(map(str, found['loc'])))}: {found['msg']}"
    except _DamageError as error:
        damage = f"{MANIFEST} {error}"
    except (ValueError, RecursionError):  # json's and Unicode's
        damage = f"{MANIFEST} is empty or damaged"
    return Checkpoint(path, step, None if damage else manifest, damage)


def _shown(text: str) -> str:
    """What somebody else wrote, fit for a terminal."""
    return ascii(text)[1:-1][:60]


def _contradiction(path: Path, step: int, manifest: Manifest) -> str | None:
    if manifest.state.step != step:
        return f"{MANIFEST} is of step {manifest.state.step}"
    for name, file in manifest.files.items():
        damage = _odd(path / name)
        if damage:
            return damage
        size = (path / name).stat().st_size
        if size != file.bytes:
            return f"{name} has {size:,} of {file.bytes:,} bytes"
    return None


def _odd(path: Path) -> str | None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return f"{path.name} is missing"
    return None if stat.S_ISREG(mode) else f"{path.name} is not a regular file"
