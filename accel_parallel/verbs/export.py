"""The words of `accel-parallel export`, for the verb and for the process that does it."""

import argparse
from pathlib import Path

from accel_parallel.arguments import positive, size
from accel_parallel.llama import DTYPES

EPILOG = """\
The folder holds config.json, safetensors and the tokenizer. It is complete or
not there, and needs no code of this project:

  AutoModelForCausalLM.from_pretrained(DIR); AutoTokenizer.from_pretrained(DIR)
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.formatter_class, verb.epilog = argparse.RawDescriptionHelpFormatter, EPILOG
    verb.add_argument("run", type=Path, metavar="RUN", help="run directory, such as runs/fsdp-001")
    verb.add_argument("--to", type=Path, required=True, metavar="DIR", help="new or empty folder to write to")
    verb.add_argument("--step", type=positive, metavar="N", help="checkpoint of this step; else the newest intact one")
    text = "type of the weights: float32 (the default) or bfloat16"
    verb.add_argument("--dtype", choices=DTYPES, default="float32", metavar="TYPE", help=text)
    text = "largest size of a file of weights (default: 5GB)"
    verb.add_argument("--max-shard-size", type=size, default="5GB", metavar="SIZE", help=text)
    verb.add_argument("--json", action="store_true", help="print one JSON object instead of text")
