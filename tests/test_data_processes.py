"""Several processes and one token cache: leaders, followers, and a kill in the middle."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accel_parallel.spec import Data
from accel_parallel.train.data import TokenData, prepare
from accel_parallel.train.data import cache as token_cache

# A leader that never comes to an end: all is written but the manifest.
HANG = """
import sys, time
from accel_parallel.spec import Data
from accel_parallel.train.data import build
def hang(*args):
    print("written", flush=True)
    time.sleep(120)
build.write_manifest = hang
build.prepare(Data(recipe=sys.argv[1]), 300)
"""

# Everything a training process asks for when the cache is warm.
WARM = """
import sys
from accel_parallel.spec import Data
from accel_parallel.train.data import prepare
def heavy():
    print(*[name for name in ("datasets", "transformers", "tokenizers", "pyarrow") if name in sys.modules])
for leader in (True, False):
    data = prepare(Data(recipe=sys.argv[1]), 300, leader=leader)
    assert len(data.train) and len(data.val) and data.fingerprint
    heavy()
data.decode(data.train[:5].tolist())
heavy()
"""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    monkeypatch.setenv("ACCEL_PARALLEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(token_cache, "HEARTBEAT_SECONDS", 0.3)
    monkeypatch.setattr(token_cache, "POLL_SECONDS", 0.05)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i} of the corpus"}) + "\n" for i in range(50)))
    return Data(recipe=str(path))


class InBackground(threading.Thread):
    """`prepare` in a thread of its own, with what it says."""

    def __init__(self, data: Data, leader: bool) -> None:
        super().__init__(daemon=True)
        self.data, self.leader = data, leader
        self.lines: list[str] = []
        self.result: TokenData | None = None
        self.start()

    def run(self) -> None:
        self.result = prepare(self.data, 300, leader=self.leader, say=self.lines.append)


@pytest.fixture
def hanging(data: Data) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", HANG, data.recipe], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "written\n"
    yield process
    process.kill()
    process.communicate()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def entries(tmp_path: Path) -> list[Path]:
    return [entry for entry in (tmp_path / "cache" / "tokens").iterdir() if entry.is_dir()]


def test_a_warm_cache_needs_neither_datasets_nor_transformers(data: Data) -> None:
    prepare(data, 300, say=lambda line: None)
    done = subprocess.run([sys.executable, "-c", WARM, data.recipe], capture_output=True, text=True, timeout=90)
    assert done.stdout == "\n\ntokenizers\n" and done.stderr == ""


def test_a_killed_leader_leaves_nothing_that_looks_complete(
    data: Data, hanging: subprocess.Popen[str], tmp_path: Path
) -> None:
    (leftover,) = entries(tmp_path)
    assert leftover.name.startswith(".") and (leftover / "train.bin").stat().st_size > 0
    second = InBackground(data, leader=True)
    until(lambda: len(second.lines) >= 2)
    assert all(line.startswith("another process is preparing these tokens, ") for line in second.lines)
    follower = InBackground(data, leader=False)
    os.kill(hanging.pid, signal.SIGKILL)
    for waiting in (second, follower):
        waiting.join(timeout=60)
        assert waiting.result is not None
        assert entries(tmp_path) == [waiting.result.folder]


def test_leaders_at_once_do_the_work_once(data: Data, tmp_path: Path) -> None:
    leaders = [InBackground(data, leader=True) for _ in range(3)]
    for leader in leaders:
        leader.join(timeout=60)
    assert len({leader.result.fingerprint for leader in leaders if leader.result}) == 1
    assert all(leader.result for leader in leaders)
    assert sum("training a 300-token" in line for leader in leaders for line in leader.lines) == 1


def test_a_follower_waits_with_a_heartbeat(data: Data) -> None:
    follower = InBackground(data, leader=False)
    until(lambda: len(follower.lines) >= 2)
    assert all(line.startswith("waiting for the token cache, ") for line in follower.lines)
    leader = prepare(data, 300, say=lambda line: None)
    follower.join(timeout=30)
    assert follower.result is not None and follower.result.fingerprint == leader.fingerprint
    late = InBackground(data, leader=False)
    late.join(timeout=30)
    assert late.result is not None and not late.lines
