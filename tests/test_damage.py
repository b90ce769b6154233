"""Damaged checkpoints meet a real start: each is named and left alone, and training goes on from the one before."""

import ctypes
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from accel_parallel.checkpoints import complete_checkpoints
from tests.workers import Trained, train

DATA, METADATA, MANIFEST = "__1_0.distcp", ".metadata", "manifest.json"


def flip(path: Path, at: int | None = None) -> None:
    """Another bit, in the middle of the file unless it is said where."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 0x40
    path.write_bytes(content)


def swap(one: Path, other: Path) -> None:
    assert one.stat().st_size == other.stat().st_size
    assert one.read_bytes() != other.read_bytes()
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def lead_out(path: Path, outside: Path) -> None:
    """A link to just what it replaces, whose digest is right."""
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


def edit(manifest: Path, **changes: object) -> None:
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **changes}))


@dataclass(frozen=True)
class Damage:
    """`do` gets a checkpoint, the one before it, and an empty folder outside of the run; `words` is what is said."""

    do: Callable[[Path, Path, Path], object]
    words: str
    spoils_both: bool = False


OTHER_DIGEST = "is not what was written: its digest differs"
DAMAGES = {
    "data cut off": Damage(lambda it, *_: os.truncate(it / DATA, 1000), f"{DATA} has 1,000 of "),
    "a bit of the data": Damage(lambda it, *_: flip(it / DATA), f"{DATA} {OTHER_DIGEST}"),
    "a bit of the metadata": Damage(lambda it, *_: flip(it / METADATA), f"{METADATA} {OTHER_DIGEST}"),
    "no data": Damage(lambda it, *_: (it / DATA).unlink(), f"{DATA} is missing"),
    "swapped data": Damage(lambda it, before, _: swap(it / DATA, before / DATA), f"{DATA} {OTHER_DIGEST}", True),
    "no manifest": Damage(lambda it, *_: (it / MANIFEST).unlink(), f"{MANIFEST} is missing"),
    "an empty manifest": Damage(lambda it, *_: os.truncate(it / MANIFEST, 0), f"{MANIFEST} is empty or damaged"),
    "the manifest of the one before": Damage(
        lambda it, before, _: shutil.copyfile(before / MANIFEST, it / MANIFEST), f"{MANIFEST} is of step "
    ),
    "the manifest of another program": Damage(
        lambda it, *_: (it / MANIFEST).write_text('{"name": "a web app", "icons": []}'),
        f"{MANIFEST} is not one of this program",
    ),
    "another format": Damage(lambda it, *_: edit(it / MANIFEST, format=3), f"{MANIFEST} has format 3, this version"),
    "another step count": Damage(
        lambda it, *_: edit(it / MANIFEST, world_size=9), f"{MANIFEST} was changed after it was written"
    ),
    "a bit of the manifest": Damage(
        lambda it, *_: flip(it / MANIFEST, (it / MANIFEST).read_text().index('"sha256"') + 15),
        f"{MANIFEST} was changed after it was written",
    ),
    "data elsewhere": Damage(lambda it, _, outside: lead_out(it / DATA, outside), f"{DATA} is not a regular file"),
    "a manifest elsewhere": Damage(
        lambda it, _, outside: lead_out(it / MANIFEST, outside), f"{MANIFEST} is not a regular file"
    ),
    "a checkpoint elsewhere": Damage(lambda it, _, outside: lead_out(it, outside), "is not a directory"),
    "a link to nothing": Damage(
        lambda it, _, outside: (lead_out(it, outside), shutil.rmtree(outside / it.name)), "is not a directory"
    ),
}
INTACT = 1
NEWEST = INTACT + len(DAMAGES) + sum(damage.spoils_both for damage in DAMAGES.values())
ALL = [f"checkpoint.keep={NEWEST}", "checkpoint.every=1"]


@pytest.fixture(scope="module")
def original(toy: list[str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run with a checkpoint of each of its steps."""
    run = tmp_path_factory.mktemp("damage") / "run"
    result = train(run, "fsdp", 2, [*toy, *ALL], argv=["--stop-at", str(NEWEST)])
    assert list(complete_checkpoints(result.run)) == list(range(1, NEWEST + 1))
    return result


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    return folder


def copy_of(original: Trained, folder: Path, *steps: int) -> Path:
    """The run with only those of its checkpoints, and none of its lines."""
    run = folder / "run"
    shutil.copytree(original.run, run)
    for step, path in complete_checkpoints(run).items():
        if step not in steps:
            shutil.rmtree(path)
    (run / "metrics.jsonl").unlink()
    return run


def at(run: Path, step: int) -> Path:
    return run / f"checkpoints/step-{step:08d}"


def content(path: Path) -> dict[str, object]:
    """All there is to see of a checkpoint, without following a link."""
    parts = [path] if path.is_symlink() or not path.is_dir() else sorted(path.iterdir())
    return {
        part.name: part.readlink() if part.is_symlink() else (part.read_bytes(), part.stat().st_mtime_ns)
        for part in parts
    }


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """Nobody opens, reads, changes or removes anything in the folder; inotify(7) tells."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK)
    everything = 0xFFF
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        assert libc.inotify_add_watch(descriptor, bytes(path), everything) >= 0
    try:
        yield
        with pytest.raises(BlockingIOError):
            os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def said(result: Trained, run: Path, step: int) -> list[str]:
    """The lines about one checkpoint."""
    return [line for line in result.log.splitlines() if str(at(run, step)) in line]


@pytest.fixture(scope="module")
def all_at_once(
    original: Trained, toy: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Trained, dict[str, int], dict[int, dict[str, object]]]:
    """A start from a run whose checkpoints but the oldest are damaged, each in a way of its own."""
    folder = tmp_path_factory.mktemp("all")
    run = copy_of(original, folder, *range(1, NEWEST + 1))
    (folder / "outside").mkdir()
    places, step = {}, NEWEST
    for name, damage in DAMAGES.items():
        places[name] = step
        damage.do(at(run, step), at(run, step - 1), folder / "outside")
        step -= 1 + damage.spoils_both
    assert step == INTACT
    before = {step: content(at(run, step)) for step in range(INTACT, NEWEST + 1)}
    with untouched(folder / "outside"):
        result = train(run, "fsdp", 2, [*toy, *ALL[:1]])
    return result, places, before


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_is_named_in_one_line_and_left_alone(
    name: str, all_at_once: tuple[Trained, dict[str, int], dict[int, dict[str, object]]]
) -> None:
    result, places, before = all_at_once
    for step in range(places[name] - DAMAGES[name].spoils_both, places[name] + 1):
        [line] = said(result, result.run, step)
        assert line.startswith(f"{at(result.run, step)} is not used: {DAMAGES[name].words}")
        assert content(at(result.run, step)) == before[step]


def test_the_intact_one_is_used(
    original: Trained, all_at_once: tuple[Trained, dict[str, int], dict[int, dict[str, object]]]
) -> None:
    result = all_at_once[0]
    assert result.exit_codes == [0, 0], (result.errors, result.log)
    assert f"continues at step {INTACT} of 20" in result.log
    assert result.column("loss")[: NEWEST - INTACT] == original.column("loss")[INTACT:]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("a bit of the data", "a link to nothing") else pytest.mark.slow)
        for name in DAMAGES
    ],
)
def test_training_past_the_damaged_one_puts_it_aside(
    name: str, original: Trained, outside: Path, toy: list[str], tmp_path: Path
) -> None:
    """The newest of three is damaged; the run goes on from the one before, and saves that step again."""
    run = copy_of(original, tmp_path, 2, 4, 6)
    DAMAGES[name].do(at(run, 6), at(run, 4), outside)
    damaged = content(at(run, 6))
    with untouched(outside):
        result = train(run, "fsdp", 2, [*toy, "checkpoint.keep=3"], argv=["--stop-at", "6"])
    assert result.exit_codes == [0, 0], (result.errors, result.log)
    good = 2 if DAMAGES[name].spoils_both else 4
    assert f"continues at step {good} of 20" in result.log
    assert result.column("loss") == original.column("loss")[good:6]
    assert 6 in complete_checkpoints(run)
    [aside] = (run / "checkpoints").glob(".damaged-step-00000006-*")
    kept = content(aside)
    assert list(kept.values()) == list(damaged.values())


def test_without_verification_sizes_are_seen_and_bits_are_not(
    original: Trained, toy: list[str], tmp_path: Path
) -> None:
    """What checkpoint.verify=false gives up: torch loads what it finds, and the run goes on from another number."""
    run = copy_of(original, tmp_path, 2, 4, 6)
    os.truncate(at(run, 6) / DATA, 1000)
    flip(at(run, 4) / DATA, exponent_of_a_weight(at(run, 4)))
    unverified = train(run, "fsdp", 2, [*toy, "checkpoint.keep=3", "checkpoint.verify=false"], argv=["--stop-at", "5"])
    assert unverified.exit_codes == [0, 0], (unverified.errors, unverified.log)
    assert said(unverified, run, 6)[0].startswith(f"{at(run, 6)} is not used: {DATA} has 1,000 of ")
    assert said(unverified, run, 4) == []
    assert "continues at step 4 of 20" in unverified.log
    assert unverified.column("loss") != pytest.approx(original.column("loss")[4:5], rel=1e-6)

    shutil.rmtree(at(run, 5))
    verified = train(run, "fsdp", 2, toy, argv=["--stop-at", "5"])
    assert said(verified, run, 4)[0].startswith(f"{at(run, 4)} is not used: {DATA} {OTHER_DIGEST}")
    assert "continues at step 2 of 20" in verified.log
    assert verified.column("loss") == original.column("loss")[2:5]


def exponent_of_a_weight(checkpoint: Path) -> int:
    """Where in the second rank's file the highest byte of a float32 of its share of a matrix stands."""
    from torch.distributed.checkpoint import FileSystemReader

    stored = FileSystemReader(checkpoint).read_metadata().storage_data
    assert stored is not None
    [place] = [
        place
        for index, place in stored.items()
        if index.fqn == "model.blocks.0.ffn.down_proj.weight" and place.relative_path == DATA
    ]
    # The stored tensor is a zip archive whose numbers are aligned to 64 bytes.
    return int(place.offset + place.length // 2 // 64 * 64 + 3)
