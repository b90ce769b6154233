"""File operations that leave the old or the new, never a part."""

import os
from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    """Replace a small text file so that a reader sees the old or the new one. Raises OSError, leaving the old one."""
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def fsync(path: Path) -> None:
    """Wait until a file, or a directory's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
