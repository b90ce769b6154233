"""`just torture [--seed N] [--kills N]`: training is killed again and again, and must end as if it never had been.

Workers get SIGKILL, one of them or all, at random moments: before the first step, between two steps, and while a
checkpoint is being written. Each time the job is started again. What is checked after each kill: no checkpoint looks
complete and is not, and the next start goes on from the newest. At the end: every line of the loss curve is that of a
run that was left alone, bit for bit.

A kill counts as one inside a save only if, with all workers stopped, a checkpoint that is not yet visible has bytes.
"""

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from accel_parallel.checkpoints import MANIFEST, PARTIAL, list_checkpoints, newest_step, wrong_digest
from accel_parallel.metrics import by_step, read_lines
from tests.workers import TIMEOUT, Job, log_of, start_training, train

STRATEGIES = ("ddp", "fsdp", "fsdp1_full_shard")
WORLD_SIZE = 2
EVERY = 4
STEPS = 80
NUMBERS = ("tokens", "loss", "grad_norm", "lr")
MOMENTS = {"save": 5, "step": 4, "start": 1}
"""What a kill waits for, by how often."""
STAGES = ("", ".metadata", MANIFEST)
"""Of a save: the file that the kill waits for, the first one there is or one of the last."""
LONGEST_START_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill. `step` is the last one done, `began` where the start went on from, `kept` what the next one can use."""

    strategy: str
    in_background: bool
    aimed_at: str
    ranks: list[int]
    began: int
    step: int
    kept: int
    unpublished: dict[str, int]
    """Files of a checkpoint that was not yet visible, with their bytes."""

    @property
    def inside_a_save(self) -> bool:
        return sum(self.unpublished.values()) > 0

    @property
    def one_rank(self) -> bool:
        return len(self.ranks) == 1

    @property
    def gone_on(self) -> bool:
        """Whether the start had gone on from a checkpoint."""
        return self.began > 0

    @property
    def before_a_step(self) -> bool:
        return self.step == self.began

    @property
    def allowed(self) -> int:
        """Steps that a kill may cost: those since the newest save, and behind the loop since the one before it."""
        return 2 * EVERY if self.in_background else EVERY

    @property
    def lost(self) -> int:
        return self.step - self.kept


@dataclass(slots=True)
class Report:
    """What happened so far; `mismatches` should stay empty."""

    kills: list[Kill] = field(default_factory=list)
    starts: int = 0
    runs: int = 0
    mismatches: list[str] = field(default_factory=list)


class Torture:
    """Kills runs of one strategy, with one way to save. `say` gets a line of progress for each kill."""

    def __init__(
        self,
        folder: Path,
        strategy: str,
        sets: Sequence[str],
        *,
        in_background: bool,
        steps: int,
        draw: random.Random,
        report: Report,
        say: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self.strategy = strategy
        self.in_background = in_background
        self.sets = [*sets, f"checkpoint.every={EVERY}", f"checkpoint.async={str(in_background).lower()}"]
        self.steps = steps
        self.draw = draw
        self.report = report
        self.say = say

    def kill_runs(self, times: int, expected: dict[int, list[float]]) -> None:
        """Kill so often, over as many runs as it takes; each must end with the `expected` numbers."""
        done = 0
        while done < times:
            self.report.runs += 1
            run = self.folder / f"{self.strategy}-{self.in_background}-{self.report.runs}"
            while done < times and self._killed(run):
                done += 1
            self._finish(run, expected)

    def _killed(self, run: Path) -> bool:
        """Start, and kill; whether the run was still going."""
        [aim] = self.draw.choices(list(MOMENTS), list(MOMENTS.values()))
        ranks = sorted(self.draw.sample(range(WORLD_SIZE), self.draw.choice([1, WORLD_SIZE])))
        began, earlier = newest_step(run), len(read_lines(run / "metrics.jsonl"))
        with self._started(run) as (job, status):
            going = self._wait(aim, began, run, status, job)
            unpublished = kill(job, ranks, run, status, self.draw.choice([0.0, 0.02, 0.3])) if going else {}
            if not going or any(job.processes[rank].exitcode != -signal.SIGKILL for rank in ranks):
                self._look_at_end(job, status)
                return False
            self._look_at_start(status, began)
        self._look_at_checkpoints(run)
        steps = by_step(read_lines(run / "metrics.jsonl")[earlier:], "train")
        done = Kill(
            self.strategy,
            self.in_background,
            aim,
            ranks,
            began,
            max(steps, default=began),
            newest_step(run),
            unpublished,
        )
        if done.lost > done.allowed:
            self._mismatch(f"{done.lost} steps are lost: {done}")
        self.report.kills.append(done)
        self.say(json.dumps({"kill": len(self.report.kills), **asdict(done)}))
        return True

    def _started(self, run: Path) -> "Started":
        self.report.starts += 1
        return Started(run, self.strategy, self.sets)

    def _wait(self, aim: str, began: int, run: Path, status: Path, job: Job) -> bool:
        """Until the moment drawn for a kill; False if the job ended before."""
        if aim == "start":
            moment = time.monotonic() + self.draw.uniform(0, LONGEST_START_SECONDS)
            return wait_until(lambda: time.monotonic() > moment, job)
        if aim == "step":
            last = began + 1 + self.draw.randrange(4 * EVERY)
            return wait_until(lambda: step_of(status) >= last, job) and self._moment_later(0.05)
        first, stage = began + 1 + self.draw.randrange(3) * EVERY, self.draw.choice(STAGES)
        return (
            wait_until(lambda: step_of(status) >= first, job)
            and wait_until(lambda: any(name.endswith(stage) for name in files_of_a_save(run)), job)
            and self._moment_later(0.0 if stage == MANIFEST else 0.02)
        )

    def _moment_later(self, at_most: float) -> bool:
        time.sleep(self.draw.uniform(0, at_most))
        return True

    def _look_at_start(self, status: Path, began: int) -> None:
        """It went on from the newest checkpoint there was, as far as it came to say so."""
        log = log_of(status)
        told = re.search(r"^continues at step (\d+) of", log, re.MULTILINE)
        begun = re.search(r"^step \d+/", log, re.MULTILINE)
        if "is not used" in log or ((told or begun) and int(told[1] if told else 0) != began):
            self._mismatch(f"a start from step {began} said: {log}")

    def _look_at_end(self, job: Job, status: Path) -> None:
        results = job.results(TIMEOUT)
        if results != [("ok", 0)] * WORLD_SIZE:
            self._mismatch(f"not killed, a job ended with {results}: {log_of(status)}")

    def _look_at_checkpoints(self, run: Path) -> None:
        for found in list_checkpoints(run):
            damage = found.damage or wrong_digest(found)
            if damage:
                self._mismatch(f"{found.path}: {damage}")

    def _finish(self, run: Path, expected: dict[int, list[float]]) -> None:
        """To the end, without a kill."""
        began = newest_step(run)
        with self._started(run) as (job, status):
            self._look_at_end(job, status)
            self._look_at_start(status, began)
        self._look_at_checkpoints(run)
        found = curve(run)
        odd = [step for step in expected if found.get(step) != expected[step]]
        if odd or list(found) != list(expected) or newest_step(run) != self.steps:
            self._mismatch(f"{run}: other numbers at steps {odd or list(found)}")

    def _mismatch(self, text: str) -> None:
        self.report.mismatches.append(text)
        self.say(f"MISMATCH {text}")


class Started:
    """A job that training was started as, and the directory in which it tells what it does; ended on the way out."""

    def __init__(self, run: Path, strategy: str, sets: Sequence[str]) -> None:
        self._status = tempfile.TemporaryDirectory()
        self._job = start_training(run, strategy, WORLD_SIZE, sets, Path(self._status.name))

    def __enter__(self) -> tuple[Job, Path]:
        return self._job, Path(self._status.name)

    def __exit__(self, *_: object) -> None:
        end(self._job)
        self._status.cleanup()


def kill(job: Job, ranks: Sequence[int], run: Path, status: Path, seconds: float) -> dict[str, int]:
    """Kill some of the workers, and the others `seconds` later. What was being saved, seen while all stood still."""
    send(job.pids, signal.SIGSTOP)
    time.sleep(0.003)
    # Before the first step it could be what an earlier kill left, and is cleared away.
    unpublished = files_of_a_save(run) if step_of(status) else {}
    send([job.pids[rank] for rank in ranks], signal.SIGKILL)
    # The others notice, and until the launcher ends them it is up to them what they do.
    send(job.pids, signal.SIGCONT)
    time.sleep(seconds)
    end(job)
    return unpublished


def send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def end(job: Job) -> None:
    """As the launcher does once a worker has failed."""
    for process in job.processes:
        process.kill()
    for process in job.processes:
        process.join()


def wait_until(condition: Callable[[], bool], job: Job) -> bool:
    """Look often, as a save takes milliseconds; False if the job ended before."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if not all(process.is_alive() for process in job.processes):
            return False
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.0005)
    return True


def step_of(status: Path) -> int:
    """The step that the main process computes, 0 before the first."""
    try:
        return int((status / "step-0").read_text() or 0)
    except FileNotFoundError:
        return 0


def files_of_a_save(run: Path) -> dict[str, int]:
    """The files of checkpoints that are being written, with their bytes; those without any are left out."""
    found = {}
    for path in (run / "checkpoints").glob(f"{PARTIAL}*/*"):
        with suppress(FileNotFoundError):
            if size := path.stat().st_size:
                found[f"{path.parent.name}/{path.name}"] = size
    return found


def curve(run: Path) -> dict[int, list[float]]:
    """The numbers of each step, as they were reported last."""
    rows = by_step(read_lines(run / "metrics.jsonl"), "train").items()
    return {step: [row[key] for key in NUMBERS] for step, row in rows}


def reference(folder: Path, strategy: str, sets: Sequence[str]) -> dict[int, list[float]]:
    """The numbers of a run that was left alone."""
    result = train(folder / f"{strategy}-left-alone", strategy, WORLD_SIZE, sets)
    assert result.exit_codes == [0] * WORLD_SIZE, (result.errors, result.log)
    return curve(result.run)


def torture(
    folder: Path,
    sets: Sequence[str],
    *,
    seed: int,
    kills: int,
    steps: int = STEPS,
    say: Callable[[str], None],
    strategies: Sequence[str] = STRATEGIES,
) -> Report:
    """Spread the kills over the strategies and both ways to save."""
    report = Report()
    sets = [*sets, f"training.steps={steps}"]
    ways = [(strategy, in_background) for in_background in (False, True) for strategy in strategies]
    expected = {strategy: reference(folder, strategy, sets) for strategy in strategies}
    for number, (strategy, in_background) in enumerate(ways):
        times = kills * (number + 1) // len(ways) - kills * number // len(ways)
        draw = random.Random(f"{seed} {strategy} {in_background}")
        victim = Torture(
            folder, strategy, sets, in_background=in_background, steps=steps, draw=draw, report=report, say=say
        )
        victim.kill_runs(times, expected[strategy])
    return report


def table(report: Report) -> str:
    """One row for each strategy and way to save, and one for all."""
    groups: dict[tuple[str, str], list[Kill]] = {}
    for done in report.kills:
        groups.setdefault((done.strategy, "behind" if done.in_background else "waiting"), []).append(done)
    names = ("one_rank", "gone_on", "before_a_step", "inside_a_save")
    rows = [("strategy", "save", "kills", *(name.replace("_", " ") for name in names), "steps lost", "at most")]
    for (strategy, save), kills in [*groups.items(), (("all", ""), report.kills)]:
        lost = [done.lost for done in kills]
        counts = [sum(getattr(done, name) for done in kills) for name in names]
        rows.append((strategy, save, *map(str, [len(kills), *counts, sum(lost), max(lost, default=0)])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    restarts = report.starts - report.runs
    return "\n".join([*lines, f"{report.runs} runs, {restarts} restarts, {len(report.mismatches)} mismatches"])


def main() -> int:
    from tests.conftest import TOY, write_corpus
    from tests.test_catalogue import SHAPE

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="decides the moments and the ranks")
    parser.add_argument("--kills", type=int, default=100)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["ACCEL_PARALLEL_CACHE"] = str(folder / "cache")
        sets = [*TOY, *SHAPE, f"data.recipe={write_corpus(folder / 'corpus')}"]
        report = torture(folder, sets, seed=arguments.seed, kills=arguments.kills, say=print)
    print(f"seed {arguments.seed}, a checkpoint each {EVERY} of {STEPS} steps")
    print(table(report))
    return bool(report.mismatches)


if __name__ == "__main__":
    sys.exit(main())
