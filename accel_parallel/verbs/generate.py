"""The words of `accel-parallel generate`, for the verb and for the process that does it."""

import argparse
from pathlib import Path

from accel_parallel.arguments import above_zero, natural, positive, some_text

EPILOG = """\
The weights are loaded into transformers' LlamaForCausalLM, in memory, whose
generate keeps the keys and values of what it has read (a KV cache).
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.formatter_class, verb.epilog = argparse.RawDescriptionHelpFormatter, EPILOG
    verb.add_argument("run", type=Path, metavar="RUN", help="run directory, or a folder that export wrote")
    verb.add_argument("--prompt", type=some_text, required=True, metavar="TEXT", help="text to continue")
    text = "tokens to add at most (default: 64)"
    verb.add_argument("--max-new-tokens", type=positive, default=64, metavar="N", help=text)
    text = "draw each token at this temperature; without it and --top-k the likeliest is taken"
    verb.add_argument("--temperature", type=above_zero, metavar="T", help=text)
    verb.add_argument("--top-k", type=positive, metavar="K", help="draw from the K likeliest tokens only")
    verb.add_argument("--seed", type=natural, default=0, metavar="N", help="of the drawing (default: 0)")
    verb.add_argument("--step", type=positive, metavar="N", help="checkpoint of this step; else the newest intact one")
    verb.add_argument("--json", action="store_true", help="print one JSON object at the end instead of text")
