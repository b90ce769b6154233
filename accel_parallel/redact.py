"""What a run writes down about its launch, without the secrets that may be in it."""

import re
from collections.abc import Iterable, Mapping

HIDDEN = "***"
# Not data.max_tokens and data.tokenizer, which are ours and say what was trained on.
_SECRET = re.compile(r"(?<!MAX_)TOKEN(?!IZER)|SECRET|PASSWORD|CREDENTIAL|KEY$", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/?#\s]*@")


def is_secret(name: str) -> bool:
    """Whether a variable, an option or a key of this name holds a secret."""
    return _SECRET.search(name.strip()) is not None


def without_login(text: str) -> str:
    """The text with `user:password` of every URL in it hidden."""
    return _LOGIN.sub(f"{HIDDEN}@", text)


def redact_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables, the values of secret ones hidden."""
    return {name: HIDDEN if is_secret(name) else without_login(value) for name, value in variables.items()}


def redact_command(arguments: Iterable[str]) -> list[str]:
    """A command line; hidden are values of secret names: `--hf-token=X`, `--set a.token=X`, `--token X`."""
    result: list[str] = []
    value_follows = False
    for argument in arguments:
        hidden = value_follows and not argument.startswith("--")
        result.append(HIDDEN if hidden else _redact(argument))
        value_follows = not hidden and argument.startswith("-") and "=" not in argument and is_secret(argument)
    return result


def _redact(argument: str) -> str:
    for equals in re.finditer("=", argument):
        if is_secret(argument[: equals.start()]):
            return argument[: equals.end()] + HIDDEN
    return without_login(argument)
