"""What every verb does with its result: text or one JSON object on stdout, problems on stderr, the exit code."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from accel_parallel.errors import AccelParallelError, Problem, of_the_system
from accel_parallel.say import say

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Result:
    """What a verb prints, and how it ends: `exit_code` is 1 if something that was asked about is not so."""

    data: Any
    lines: Sequence[str]
    problems: Sequence[Problem] = ()
    exit_code: int = 0


class Output:
    """Where a verb leaves its result."""

    def __init__(self, command: str, as_json: bool) -> None:
        self._command = command
        self._as_json = as_json

    def say(self, text: str) -> None:
        """One line of progress, on stderr."""
        say(text)

    def end(self, result: Result) -> None:
        """Print the result and end the process."""
        self.finish(result.data, result.lines, result.problems, result.exit_code)

    def finish(self, data: Any, lines: Sequence[str], problems: Sequence[Problem], exit_code: int) -> None:
        """Print the result and end the process."""
        if self._as_json:
            found = [problem.to_dict() for problem in problems]
            content = {
                "schema": SCHEMA,
                "command": self._command,
                "ok": exit_code == 0,
                "exit_code": exit_code,
                "data": data,
                "problems": found,
            }
            _print(json.dumps(content, indent=1))
        else:
            if lines:
                _print("\n".join(lines))
            for problem in problems:
                self.say(f"{problem.severity}: {problem}")
        sys.exit(exit_code)


@contextmanager
def failing(command: str, as_json: bool) -> Iterator[Output]:
    """Turn an AccelParallelError into its line and exit code, Ctrl-C into 130."""
    output = Output(command, as_json)
    try:
        yield output
    except AccelParallelError as error:
        output.finish(None, [], error.problems, error.exit_code)
    except OSError as error:
        output.finish(None, [], of_the_system(error).problems, 2)
    except KeyboardInterrupt:
        output.finish(None, [], [Problem("interrupted", code="interrupted")], 130)


def _print(text: str) -> None:
    try:
        print(text, flush=True)  # noqa: T201
    except OSError as error:
        # Keep the interpreter from saying so again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            sys.stderr.write(f"error: cannot write to the standard output: {error.strerror}\n")
            sys.exit(2)
