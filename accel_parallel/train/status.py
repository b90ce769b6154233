"""How a worker tells its end: in a directory that our launcher reads, or else on the terminal."""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from accel_parallel.errors import AccelParallelError, Problem, of_the_system
from accel_parallel.files import write_atomic
from accel_parallel.say import say
from accel_parallel.summary import render_summary
from accel_parallel.train.agent import AGENT, die_with_parent, read_pid
from accel_parallel.train.control import Control
from accel_parallel.train.failure import crash, explain

_STARTERS = ("status.py", "script.py", "__main__.py", "<frozen runpy>")


class Status:
    """One process's way to tell how it ended. `directory` is our launcher's, None under any other."""

    def __init__(self, directory: Path | None) -> None:
        rank = os.environ.get("RANK", "0")
        self._rank = int(rank) if rank.isdigit() else 0
        self._directory = directory
        self.control = Control(directory, self._rank)

    def run(self, body: Callable[[], dict[str, Any] | None]) -> int:
        """Call `body`, tell its summary or what went wrong, and return the exit code of this process."""
        try:
            summary = body()
        except AccelParallelError as error:
            return self.failed(error.exit_code, error.problems)
        except KeyboardInterrupt:
            return 130
        except SystemExit:
            raise
        except BaseException as error:  # torch raises some of its own that are no Exception
            if isinstance(error, OSError) and error.filename:
                return self.failed(2, of_the_system(error).problems)
            return self.crashed(error)
        if summary is not None:
            self.finished(summary)
        return 0

    def finished(self, summary: dict[str, Any]) -> None:
        if self._directory:
            self._write("summary.json", summary)
        else:
            print(render_summary(summary))  # noqa: T201

    def crashed(self, error: BaseException) -> int:
        known = explain(error, self._rank, self.control.step)
        if known is not None:
            return self.failed(known.exit_code, known.problems)
        return self.failed(1, [crash(error, self._rank, self.control.step)], trace_of(error))

    def failed(self, exit_code: int, problems: list[Problem], trace: str | None = None) -> int:
        if self._directory:
            error = {
                "rank": self._rank,
                "exit_code": exit_code,
                "problems": [problem.to_dict() for problem in problems],
                "traceback": trace,
                "time": time.time(),
            }
            self._write(f"error-{self._rank}.json", error)
            return exit_code
        if self._rank:
            # When all ranks fail of the same cause, the launcher ends this one before it repeats the main one's words.
            time.sleep(2)
        for problem in problems:
            say(f"error: {problem}")
        if trace:
            say(trace)
        return exit_code

    def _write(self, name: str, content: dict[str, Any]) -> None:
        assert self._directory is not None
        write_atomic(self._directory / name, json.dumps(content))


def trace_of(error: BaseException) -> str:
    """The traceback without what only starts the training or the script."""
    trace = error.__traceback__
    while trace and trace.tb_next and Path(trace.tb_frame.f_code.co_filename).name in _STARTERS:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def end_process(code: int) -> None:
    """End this process with what it printed. Not sys.exit: see `_NEVER_FREED` in the runtime."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where the launcher was started with it closed
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def open_status(directory: Path | None) -> Status:
    """The status of this process, which from now on dies with the launcher that reads it."""
    if directory is not None:
        die_with_parent(signal.SIGKILL, read_pid(directory / AGENT))
        write_atomic(directory / f"pid-{os.environ.get('RANK', '0')}", str(os.getpid()))
    return Status(directory)
