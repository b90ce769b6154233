"""The token cache on disk: an entry is complete or invisible."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from accel_parallel.errors import DataError
from accel_parallel.files import fsync

VARIABLE = "ACCEL_PARALLEL_CACHE"
FORMAT = 2
"""Raised whenever equal input would give other files."""
MANIFEST = "manifest.json"
POLL_SECONDS = 0.2
HEARTBEAT_SECONDS = 10.0


def cache_root() -> Path:
    """`$ACCEL_PARALLEL_CACHE`, else `$XDG_CACHE_HOME/accel_parallel`, else `~/.cache/accel_parallel`."""
    if named := os.environ.get(VARIABLE):
        try:
            return Path(named).expanduser().absolute()
        except RuntimeError:
            raise DataError(f"${VARIABLE} is {named!r}: there is no such user", hint="give a path") from None
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache").absolute() / "accel_parallel"


def entry_folder(identity: dict[str, Any]) -> Path:
    """The folder of the entry whose content `identity` decides."""
    text = json.dumps({"format": FORMAT, **identity}, sort_keys=True)
    return cache_root() / "tokens" / sha256(text.encode()).hexdigest()[:24]


def entries() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every complete entry: its folder and its manifest."""
    for path in sorted((cache_root() / "tokens").glob(f"*/{MANIFEST}")):
        if manifest := read_manifest(path.parent):
            yield path.parent, manifest


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a complete entry; `None` if there is none, or its token files are not as long as it says."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for split in ("train", "val"):
            itemsize = int(manifest["dtype"].removeprefix("uint")) // 8
            if (folder / f"{split}.bin").stat().st_size != manifest[split]["tokens"] * itemsize:
                return None
    except (OSError, ValueError, KeyError):
        return None
    return manifest


@contextmanager
def locked(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Be the only process that prepares this entry. The lock dies with its holder.

    Raises DataError if the cache cannot be written.
    """
    from filelock import FileLock, Timeout

    waited = 0.0
    with writable(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_suffix(".lock"))
        while True:
            try:
                lock.acquire(timeout=HEARTBEAT_SECONDS)
                break
            except Timeout:
                waited += HEARTBEAT_SECONDS
                say(f"another process is preparing these tokens, {waited:.0f} s")
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Turn errors of the disk into one line that names the cache and how to move it."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write the token cache {folder.parent}: {error.strerror or error}",
            hint=f"set {VARIABLE} to a folder with room that you can write to",
        ) from error


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well, and goes away when it does not.

    To be called with the lock held: what an earlier, killed process left behind is removed first.
    """
    with writable(folder):
        for stale in folder.parent.glob(f".{folder.name}-*"):
            shutil.rmtree(stale, ignore_errors=True)
        temporary = folder.parent / f".{folder.name}-{os.getpid()}"
        temporary.mkdir()
    try:
        # Errors of reading are DataErrors by now, so an OSError in the block is about what it writes.
        with writable(folder):
            yield temporary
            _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Written last: an entry with a manifest has everything else."""
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _publish(temporary: Path, folder: Path) -> None:
    for path in [*temporary.rglob("*"), temporary]:
        fsync(path)
    if folder.exists():
        # Incomplete, or nobody would have built it again.
        shutil.rmtree(folder)
    temporary.rename(folder)
    fsync(folder.parent)


def wait_for(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Poll until another process has made the entry, with a heartbeat; never gives up, whoever launched us ends us."""
    began = time.monotonic()
    beats = 0
    while (manifest := read_manifest(folder)) is None:
        waited = time.monotonic() - began
        if waited >= (beats + 1) * HEARTBEAT_SECONDS:
            beats = int(waited // HEARTBEAT_SECONDS)
            say(f"waiting for the token cache, {beats * HEARTBEAT_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)
    return manifest
