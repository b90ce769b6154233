"""`python -m accel_parallel.train.prepare`: make the tokens of a specification before training needs them."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_parallel.errors import AccelParallelError
from accel_parallel.spec import find_spec, load_spec
from accel_parallel.train.data import TokenData, prepare


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the tokens; the summary goes to stdout, progress and errors to stderr. Returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        spec = load_spec(find_spec(options.spec), sets=options.set)
        data = prepare(spec.data, spec.model.vocab_size)
    except AccelParallelError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(json.dumps(summary(data)) + "\n" if options.json else describe(data))
    return 0


def summary(data: TokenData) -> dict[str, Any]:
    """The manifest and where the cache is, as JSON."""
    return {**data.manifest, "cache": str(data.folder)}


def describe(data: TokenData) -> str:
    """The summary for people."""
    manifest = data.manifest
    train, val, tokenizer = manifest["train"], manifest["val"], manifest["tokenizer"]
    how = {"split": "the source's own split", "documents": "whole documents", "tails": "the end of each document"}
    rows = {
        "source": manifest["source"],
        "train": f"{train['tokens']:,} tokens in {train['documents']:,} documents",
        "held out": f"{val['tokens']:,} tokens in {val['documents']:,} documents ({how[manifest['held_out']]})",
        "vocabulary": f"{tokenizer['vocab_size']:,} tokens ({tokenizer['name']})",
        "cache": str(data.folder),
    }
    return "".join(f"{name:<11} {value}\n" for name, value in rows.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m accel_parallel.train.prepare", description=__doc__)
    parser.add_argument("--spec", type=Path, metavar="FILE", help="the specification; default: the usual places")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
