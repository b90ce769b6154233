"""Measures what saving costs here: `just measure-checkpoints`. Takes minutes, and a machine without other work.

Writes `docs/checkpoints.json`. Real launches on CPU processes, saving while the loop waits and in the background by
turns, between them `dd` with fsync of as many bytes on the same disk. The first save of a launch is left out: it
imports what saving needs.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accel_parallel.metrics import by_step, read_lines
from accel_parallel.spec import load_spec

RESULT = Path(__file__).parent / "checkpoints.json"
STRATEGIES = ("ddp", "fsdp")
REPEATS = 1
SETS = (
    *("model.vocab_size=4096", "model.num_layers=8", "model.num_heads=8", "model.num_kv_heads=8"),
    *("model.hidden_dim=512", "model.ffn_dim=1408", "model.seq_len=64"),
    *("training.batch_size=8", "training.steps=20", "checkpoint.every=4", "logging.every=1", "logging.eval_every=0"),
    *("logging.eval_batches=1", "data.max_tokens=200000"),
)
PROCESSES = 2


def main() -> int:
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", ".")) as name:
        folder = Path(name)
        rounds: dict[tuple[str, bool], list[dict[str, float]]] = {}
        plain: list[float] = []
        for repeat in range(REPEATS):
            for strategy in STRATEGIES:
                for behind in (False, True):
                    found = saves(folder / f"{strategy}-{behind}-{repeat}", strategy, behind)
                    rounds.setdefault((strategy, behind), []).extend(found)
                    plain.append(written_by_dd(folder, int(found[0]["bytes"])))
                    sys.stderr.write(f"measured  {strategy}, async {behind}, {repeat + 1} of {REPEATS}\n")
    spec = load_spec(None, SETS)
    content = {
        "versions": {name: version(name) for name in ("torch", "accelerate")},
        "parameters": spec.model.shape.total_parameters,
        "processes": PROCESSES,
        "dd_bytes_per_second": spread(plain),
        "saves": [
            {"strategy": strategy, "async": behind, "bytes": found[0]["bytes"], "number": len(found)}
            | {key: spread([row[key] for row in found]) for key in ("stood_still", "seconds")}
            for (strategy, behind), found in rounds.items()
        ],
    }
    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def saves(run: Path, strategy: str, behind: bool) -> list[dict[str, Any]]:
    """The lines about saves of one launch, without the first and the last: at the end the loop waits in any case."""
    sets = [*SETS, f"checkpoint.async={str(behind).lower()}", f"distributed.processes_per_machine={PROCESSES}"]
    options = [part for entry in sets for part in ("--set", entry)]
    command = ["accel-parallel", "launch", strategy, "--cpu", "--run", str(run), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{strategy}: {done.stderr}")
    rows = list(by_step(read_lines(run / "metrics.jsonl"), "save").values())
    return [dict(row) for row in rows[1:-1]]


def written_by_dd(folder: Path, size: int) -> float:
    """Bytes per second of `dd` that waits for the disk."""
    target = folder / "dd"
    mebibytes = size // 2**20
    begun = time.perf_counter()
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=1M", f"count={mebibytes}", "conv=fsync", "status=none"]
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - begun
    target.unlink()
    return mebibytes * 2**20 / seconds


if __name__ == "__main__":
    sys.exit(main())
