"""The words of each verb that is done here; those of verbs for a child process stand in `accel_parallel.verbs`."""

import argparse
from pathlib import Path

from accel_parallel.arguments import natural, positive
from accel_parallel.cli.parser import Parser

# Not read from the catalogue, whose import takes a tenth of a second; a test compares.
LAUNCH_EPILOG = """\
strategies:
  single                one process on one device
  ddp                   a replica in each process
  fsdp                  a shard in each process, as the fsdp section says
  fsdp_shard_grad_op    fsdp_hybrid_shard    fsdp_cpu_offload
  fsdp1_full_shard      fsdp1_shard_grad_op  fsdp1_no_shard
  fsdp1_hybrid_shard    fsdp1_cpu_offload    (FSDP version 1)

Without a script, the project's training loop runs. A script of yours runs under
the same file: on accelerators, or really sharded on CPU processes.

exit codes: 0 done, 1 a check or a worker failed, 2 bad input (or no memory, a
full disk, a loss that is not finite), 130 interrupted
"""

PREPARE_EPILOG = """The text is data.recipe: a recipe's name, a file or folder of text, JSONL or
Parquet, or a dataset on the Hub, such as --set data.recipe=path/to/folder.
Tokens are cached in ~/.cache/accel_parallel, or $ACCEL_PARALLEL_CACHE.
"""


REHEARSE_EPILOG = """\
Without a script, the project's training loop is rehearsed, against one process.
A script of yours runs as it is, with its own arguments, in its own folder: what
it saves it saves. What can be seen of it from outside is compared.

exit codes: 0 as asked, 1 something is not, 2 bad input, 130 interrupted
"""


def _specification(verb: Parser) -> None:
    text = "specification; else $ACCEL_PARALLEL_SPEC, else accelerate_configs/parallelism.yaml, else the defaults"
    verb.add_argument("--spec", type=Path, metavar="FILE", help=text)
    text = "override a key, such as training.steps=20; may be repeated"
    verb.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=text)


def _json(verb: Parser) -> None:
    verb.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def config_words(verb: Parser) -> None:
    _specification(verb)
    verb.add_argument("--out", type=Path, metavar="DIR", help="folder to write to; the specification's own by default")
    verb.add_argument("--check", action="store_true", help="write nothing; exit 1 and show what is stale")
    _json(verb)


def prepare_words(verb: Parser) -> None:
    _specification(verb)
    verb.epilog = PREPARE_EPILOG
    verb.formatter_class = argparse.RawDescriptionHelpFormatter


def launch_words(verb: Parser) -> None:
    verb.add_argument("target", metavar="STRATEGY|FILE", help="a strategy (see below), or any accelerate YAML file")
    _specification(verb)
    verb.add_argument("--num-processes", type=positive, metavar="N", help="processes on each machine")
    verb.add_argument("--cpu", action="store_true", help="use CPUs even where there are accelerators")
    verb.add_argument("--keep-precision", action="store_true", help="on CPU, compute in the asked precision")
    verb.add_argument("--run", type=Path, metavar="DIR", help="run directory to start in or continue")
    verb.add_argument("--fresh", action="store_true", help="start a new run directory")
    text = "weights to start from: a Hugging Face Llama folder (model.init_from)"
    verb.add_argument("--init-from", type=Path, metavar="DIR", help=text)
    verb.add_argument("--stop-at", type=positive, metavar="STEP", help="save and stop after this step")
    verb.add_argument("--machine-rank", type=int, metavar="N", help="this machine's number, with several")
    text = "start again when a worker dies, up to N times; 0 by default"
    verb.add_argument("--max-restarts", type=natural, default=0, metavar="N", help=text)
    text = "on CPU, let a plugin that only the script passes shard"
    verb.add_argument("--fsdp-in-script", action="store_true", help=text)
    verb.add_argument("--dry-run", action="store_true", help="print file, environment and command; start nothing")
    verb.add_argument("--print-env", action="store_true", help="print the environment that torchrun needs, for eval")
    verb.usage = "%(prog)s STRATEGY|FILE [options] [-- [-m] SCRIPT ARGS]"
    verb.epilog = LAUNCH_EPILOG
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    _json(verb)


def rehearse_words(verb: Parser) -> None:
    verb.add_argument("targets", nargs="*", metavar="STRATEGY|FILE", help="strategies, or any accelerate YAML files")
    verb.add_argument("--all", action="store_true", help="every strategy, one after the other")
    verb.add_argument("-n", "--num-processes", type=positive, metavar="N", help="processes on each machine")
    verb.add_argument("--keep-precision", action="store_true", help="compute in the asked precision, slow on CPUs")
    text = "only simulate a step, on fake tensors, in a world of N processes"
    verb.add_argument("--scale", type=positive, metavar="N", help=text)
    text = "let a plugin that only the script passes shard"
    verb.add_argument("--fsdp-in-script", action="store_true", help=text)
    text = "run the script under DDP too, and compare its losses"
    verb.add_argument("--against-ddp", action="store_true", help=text)
    verb.add_argument("--junit", type=Path, metavar="FILE", help="write the answers as JUnit XML too")
    verb.usage = "%(prog)s STRATEGY|FILE... [options] [-- [-m] SCRIPT ARGS]"
    verb.epilog = REHEARSE_EPILOG
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    _specification(verb)
    _json(verb)


def explain_words(verb: Parser) -> None:
    verb.add_argument(
        "target", metavar="STRATEGY|FILE", help="a strategy of the catalogue, or any accelerate YAML file"
    )
    _specification(verb)
    verb.add_argument("--num-processes", type=positive, metavar="N", help="processes on each machine")
    text = "a model of yours instead: a folder with a Hugging Face config.json, or pkg.module:factory"
    verb.add_argument("--model", metavar="MODEL", help=text)
    _json(verb)


def checkpoints_words(verb: Parser) -> None:
    verb.add_argument("run", type=Path, metavar="RUN", help="a run directory, such as runs/fsdp-001")
    verb.add_argument("--verify", action="store_true", help="read every file; exit 1 if one is not what was written")
    text = "whether the newest loads under this strategy or accelerate file, and what changes; exit 1 if it does not"
    verb.add_argument("--for", dest="target", metavar="STRATEGY|FILE", help=text)
    verb.add_argument("--num-processes", type=positive, metavar="N", help="with --for: processes on each machine")
    _specification(verb)
    _json(verb)
