"""Answers `accelerate config`, the real program, through a pseudo-terminal.

The expected questions stand in order, each with its answer: a question that is new, missing, reordered or whose menu
has lost a choice ends the session with an AssertionError that names it. Seen on accelerate 1.15.
"""

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

Answers = Sequence[tuple[str, str]]
"""(regular expression found in the question, what to type; for a menu: the choice as it is shown)."""

COLUMNS = 400  # wider than every question, so that none is broken over two lines
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"  # around the time in which a menu waits for keys
_MENU_HELP = "Please select a choice"

_MACHINE = (
    (r"In which compute environment are you running", "This machine"),
    (r"Which type of machine are you using", "multi-GPU"),
    (r"How many different machines will you use", "1"),
    (r"Should distributed operations be checked", "no"),
    (r"optimize your script with torch dynamo", "no"),
    (r"Do you want to use DeepSpeed", "no"),
)
_BLOCKS = (
    (r"offload parameters and gradients to CPU", "no"),
    (r"What should be your auto wrap policy", "TRANSFORMER_BASED_WRAP"),
    (r"use the model's `_no_split_modules`", "no"),
    (r"Specify the comma-separated list of transformer layer class names", "TransformerBlock"),
)
DDP: Answers = (
    *_MACHINE,
    (r"Do you want to use FullyShardedDataParallel", "no"),
    (r"Do you want to use Megatron-LM", "no"),
    (r"How many GPU\(s\) should be used", "2"),
    (r"What GPU\(s\) \(by id\) should be used", "all"),
    (r"enable numa efficiency", "no"),
    (r"Do you wish to use mixed precision", "bf16"),
)
FSDP2: Answers = (
    *_MACHINE,
    (r"Do you want to use FullyShardedDataParallel", "yes"),
    (r"What should be your FSDP version", "2"),
    (r"enable resharding after forward", "yes"),
    *_BLOCKS,
    (r"What should be your FSDP's state dict type", "SHARDED_STATE_DICT"),
    (r"enable CPU RAM efficient model loading", "yes"),
    (r"enable FSDP activation checkpointing", "no"),
    (r"use the parallelism config", "no"),
    (r"How many GPU\(s\) should be used", "2"),
    (r"Do you wish to use mixed precision", "bf16"),
)
FSDP1_SHARD_GRAD_OP: Answers = (
    *_MACHINE,
    (r"Do you want to use FullyShardedDataParallel", "yes"),
    (r"What should be your FSDP version", "1"),
    (r"What should be your sharding strategy", "SHARD_GRAD_OP"),
    *_BLOCKS,
    (r"What should be your FSDP's backward prefetch policy", "BACKWARD_PRE"),
    (r"What should be your FSDP's state dict type", "SHARDED_STATE_DICT"),
    (r"enable FSDP's forward prefetch policy", "no"),
    (r"enable FSDP's `use_orig_params` feature", "yes"),
    (r"enable CPU RAM efficient model loading", "yes"),
    (r"enable FSDP activation checkpointing", "no"),
    (r"How many GPU\(s\) should be used", "2"),
    (r"Do you wish to use mixed precision", "no"),
)


def accelerate_config(file: Path, answers: Answers) -> None:
    """Let `accelerate config` write `file` from these answers."""
    program = str(Path(sys.executable).parent / "accelerate")
    shown = answer([program, "config", "--config_file", str(file)], answers)
    assert file.is_file(), f"the wizard ended without a file; its last words:\n{_tail(shown)}"


def answer(command: Sequence[str], answers: Answers, *, time_out: float = 120, patience: float = 1) -> str:
    """Run a program in a pseudo-terminal and answer its questions; everything it showed.

    Raises AssertionError if it asks anything else, does not ask all, fails, or says nothing new for `time_out` seconds.
    A question that is not the expected one must have stood on the screen for `patience` seconds.
    """
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (50, COLUMNS))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TERM": "xterm", "COLUMNS": str(COLUMNS), "LINES": "50"}
    with subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env=environment, start_new_session=True
    ) as process:
        os.close(follower)
        try:
            shown = _converse(leader, answers, time_out, patience)
            code = process.wait(timeout=time_out)
        finally:
            process.kill()
            os.close(leader)
    assert code == 0, f"{' '.join(command)} ended with exit code {code}; its last words:\n{_tail(shown)}"
    return shown


def _converse(leader: int, answers: Answers, time_out: float, patience: float) -> str:
    before, screen = b"", b""  # what was shown up to the last answer, and since
    left = list(answers)
    heard = time.monotonic()
    enter_at: float | None = None  # when to leave the menu whose row has been chosen
    while True:
        if select.select([leader], [], [], 0.05)[0]:
            try:
                part = os.read(leader, 65536)
            except OSError:  # how Linux says that the other end is closed
                part = b""
            if not part:
                break
            screen += part
            heard = time.monotonic()
        silence = time.monotonic() - heard
        text = screen.decode(errors="replace")
        if enter_at is not None:
            # The menu throws away what comes between two keys: Enter waits, and is typed again if it got lost.
            if _SHOW_CURSOR in text:
                enter_at = None
            elif time.monotonic() > enter_at and _reads_single_keys(leader):
                os.write(leader, b"\r")
                enter_at = time.monotonic() + 2
            elif silence > time_out:
                raise AssertionError(f"the menu does not end; shown since the last answer:\n{_tail(text)}")
            continue
        asked = _menu(text) or _field(text)
        if asked and left and re.search(left[0][0], asked[0]):
            question, choices = asked
            if not choices or _reads_single_keys(leader):
                os.write(leader, _keys(question, choices, left.pop(0)[1]))
                before, screen, heard = before + screen, b"", time.monotonic()
                enter_at = heard + 0.2 if choices else None
            else:
                assert silence < time_out, f"the menu {question!r} does not read keys"
        elif asked and silence > patience:
            expected = f"the expected question is {left[0][0]!r}" if left else "no more questions are expected"
            raise AssertionError(f"the wizard asks {asked[0]!r}; {expected}")
        elif silence > time_out:
            what = f"the question {left[0][0]!r}" if left else "the end of the wizard"
            raise AssertionError(f"waited {time_out} s for {what}; shown since the last answer:\n{_tail(text)}")
    shown = (before + screen).decode(errors="replace")
    assert not left, f"the wizard ended without asking {left[0][0]!r}; its last words:\n{_tail(shown)}"
    return shown


def _menu(screen: str) -> tuple[str, list[str]] | None:
    """The question and the choices of the menu that waits for keys."""
    if screen.rfind(_HIDE_CURSOR) <= screen.rfind(_SHOW_CURSOR):
        return None
    lines = _lines(screen)
    helps = [number for number, line in enumerate(lines) if line.startswith(_MENU_HELP)]
    if not helps:
        return None
    choices = [line.removeprefix("➔").strip() for line in lines[helps[-1] + 1 :]]
    return lines[helps[-1] - 1].lstrip("-"), choices


def _field(screen: str) -> tuple[str, list[str]] | None:
    """The question that waits for a line, if that is what the last thing shown looks like."""
    lines = _lines(screen)
    if not lines or re.search(r"[\r\n]$", screen) or not re.search(r"[:?]$", lines[-1]):
        return None
    return lines[-1], []


def _lines(screen: str) -> list[str]:
    return [line.strip() for line in re.split(r"[\r\n]+", _ESCAPE.sub("", screen)) if line.strip()]


def _reads_single_keys(leader: int) -> bool:
    """Whether a menu has put the terminal into raw mode; keys that come earlier are thrown away."""
    flags: int = termios.tcgetattr(leader)[3]
    return not flags & termios.ICANON


def _keys(question: str, choices: list[str], wanted: str) -> bytes:
    """What to type: a line, or the number of a menu's row (from 0), before Enter."""
    if not choices:
        return f"{wanted}\n".encode()
    assert wanted in choices[:10], f"the menu {question!r} has no choice {wanted!r} in its first ten rows: {choices}"
    return str(choices.index(wanted)).encode()


def _tail(shown: str) -> str:
    return "\n".join(_lines(shown)[-15:])
