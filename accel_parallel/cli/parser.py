"""The command line's parser, and what it says of a wrong one."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from accel_parallel.suggest import did_you_mean


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line, and which verb or option was probably meant."""

    def error(self, message: str) -> NoReturn:
        known = self.words(sys.argv[1:])
        if message.endswith("required: VERB"):
            message = f"which verb? {', '.join(word for word in known if not word.startswith('-'))}"
        unknown = next((word for word in sys.argv[1:] if word in message and word not in known), "")
        guess = did_you_mean(unknown.partition("=")[0], known) if unknown else ""
        if unknown.endswith(".py") and "unrecognized" in message:
            guess = "; a script of yours stands after --"
        # What a verb does not know, the whole command line's parser has to say.
        verb = next((f" {word}" for word in sys.argv[1:] if word in self.words([])), "")
        sys.stderr.write(f"error: {message}{guess} (see {self.prog}{verb} --help)\n")
        sys.exit(2)

    def words(self, typed: Sequence[str]) -> list[str]:
        """Options and verbs that may stand here; once a verb is typed, that verb's."""
        known: list[str] = []
        for action in self._actions:
            known += action.option_strings
            if isinstance(action.choices, dict):
                verb = next((action.choices[word] for word in typed if word in action.choices), None)
                known += verb.words([]) if isinstance(verb, Parser) else action.choices
        return known
