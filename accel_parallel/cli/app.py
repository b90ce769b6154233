"""The verbs. Each imports what it needs inside itself, so that `--help` stays quick.

argparse and not a larger library: with one, the start of every verb takes a tenth of a second longer.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from accel_parallel import __version__
from accel_parallel.arguments import natural, positive
from accel_parallel.cli.parser import Parser
from accel_parallel.output import Output, failing
from accel_parallel.verbs.export import add_arguments as add_export
from accel_parallel.verbs.generate import add_arguments as add_generate

DESCRIPTION = "One training loop for Hugging Face Accelerate; the parallelism is decided by generated YAML."


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


def run(argv: Sequence[str] | None) -> NoReturn:
    """Parse `argv`, by default the process's own, run its verb, and exit."""
    typed = list(sys.argv[1:] if argv is None else argv)
    # What stands after `--` is a script's, and none of it an option of ours.
    ours, script = (typed[: typed.index("--")], typed[typed.index("--") + 1 :]) if "--" in typed else (typed, [])
    arguments = parser().parse_args(ours)
    if script and arguments.verb != "launch":
        parser().error(f"{arguments.verb} takes nothing after --")
    arguments.script, arguments.words = script, ours[1:]
    with failing(arguments.verb, getattr(arguments, "json", False)) as output:
        arguments.function(arguments, output)
    sys.exit(0)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = Parser(prog="accel-parallel", description=DESCRIPTION, allow_abbrev=False)
    top.add_argument("--version", action="version", version=__version__)
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
    _config(_verb(verbs, config, "write an accelerate YAML file for every strategy from the specification"))
    _launch(_verb(verbs, launch, "train under a strategy, continuing its newest run"))
    _explain(_verb(verbs, explain, "show which FSDP units a strategy or an accelerate file makes of a model"))
    _prepare(_verb(verbs, prepare, "read, tokenise and cache the text, without training"))
    _rehearse(_verb(verbs, rehearse, "run a file on CPU processes, really sharded, and compare with what it asks for"))
    _checkpoints(_verb(verbs, checkpoints, "list what a run has saved, verify it, or see where it loads"))
    add_export(_verb(verbs, export, "write a run's weights and tokenizer as a Hugging Face Llama folder"))
    add_generate(_verb(verbs, generate, "print how a run, or an exported folder, continues a prompt"))
    return top


def config(arguments: argparse.Namespace, output: Output) -> None:
    from accel_parallel.cli.config import write_configs

    result = write_configs(arguments.spec, arguments.set, arguments.out, arguments.check)
    output.finish(result.to_dict(), result.lines(), result.problems, result.exit_code)


def launch(arguments: argparse.Namespace, output: Output) -> None:
    from accel_parallel.cli.launch import Request
    from accel_parallel.cli.launch import launch as launch_target

    request = Request(
        target=arguments.target,
        spec=arguments.spec,
        sets=(*arguments.set, *_init_from(arguments)),
        num_processes=arguments.num_processes,
        cpu=arguments.cpu,
        keep_precision=arguments.keep_precision,
        run=arguments.run,
        fresh=arguments.fresh,
        stop_at=arguments.stop_at,
        machine_rank=arguments.machine_rank,
        max_restarts=arguments.max_restarts,
        dry_run=arguments.dry_run,
        print_env=arguments.print_env,
        fsdp_in_script=arguments.fsdp_in_script,
        observe=arguments.observe,
        script=tuple(arguments.script),
    )
    result = launch_target(request, output.say)
    output.finish(result.data, result.lines, result.problems, result.exit_code)


def rehearse(arguments: argparse.Namespace, output: Output) -> None:
    from accel_parallel.cli.rehearse import Request
    from accel_parallel.cli.rehearse import rehearse as rehearse_target

    request = Request(
        target=arguments.target,
        all=arguments.all,
        spec=arguments.spec,
        sets=tuple(arguments.set),
        num_processes=arguments.num_processes,
        keep_precision=arguments.keep_precision,
        junit=arguments.junit,
    )
    result = rehearse_target(request, output.say)
    output.finish(result.data, result.lines, result.problems, result.exit_code)


def explain(arguments: argparse.Namespace, output: Output) -> None:
    from accel_parallel.cli.explain import Request
    from accel_parallel.cli.explain import explain as explain_target

    request = Request(
        target=arguments.target,
        spec=arguments.spec,
        sets=tuple(arguments.set),
        num_processes=arguments.num_processes,
        model=arguments.model,
    )
    result = explain_target(request)
    output.finish(result.data, result.lines, result.problems, result.exit_code)


def checkpoints(arguments: argparse.Namespace, output: Output) -> None:
    from accel_parallel.cli.checkpoints import Request
    from accel_parallel.cli.checkpoints import checkpoints as look_at

    request = Request(
        run=arguments.run,
        verify=arguments.verify,
        target=arguments.target,
        spec=arguments.spec,
        sets=tuple(arguments.set),
        num_processes=arguments.num_processes,
    )
    result = look_at(request, output.say)
    output.finish(result.data, result.lines, result.problems, result.exit_code)


def _init_from(arguments: argparse.Namespace) -> list[str]:
    """The override that `--init-from` is short for; quoted, as it is read as YAML."""
    return [f"model.init_from={json.dumps(str(arguments.init_from))}"] if arguments.init_from else []


def prepare(arguments: argparse.Namespace, output: Output) -> None:
    import subprocess

    command = [sys.executable, "-m", "accel_parallel.train.prepare"]
    command += ["--spec", str(arguments.spec)] if arguments.spec else []
    for entry in arguments.set:
        command += ["--set", entry]
    sys.exit(subprocess.call(command))


def export(arguments: argparse.Namespace, output: Output) -> None:
    from accel_parallel.cli.heavy import run_heavy

    run_heavy("export", arguments.words)


def generate(arguments: argparse.Namespace, output: Output) -> None:
    from accel_parallel.cli.heavy import run_heavy

    run_heavy("generate_text", arguments.words)


def _verb(
    verbs: "argparse._SubParsersAction[Parser]",
    function: Callable[[argparse.Namespace, Output], None],
    text: str,
) -> Parser:
    sentence = f"{text[0].upper()}{text[1:]}."
    verb = verbs.add_parser(function.__name__, help=text, description=sentence, allow_abbrev=False)
    verb.set_defaults(function=function)
    return verb


def _specification(verb: Parser) -> None:
    text = "specification; else $ACCEL_PARALLEL_SPEC, else accelerate_configs/parallelism.yaml, else the defaults"
    verb.add_argument("--spec", type=Path, metavar="FILE", help=text)
    text = "override a key, such as training.steps=20; may be repeated"
    verb.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=text)


def _json(verb: Parser) -> None:
    verb.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _config(verb: Parser) -> None:
    _specification(verb)
    verb.add_argument("--out", type=Path, metavar="DIR", help="folder to write to; the specification's own by default")
    verb.add_argument("--check", action="store_true", help="write nothing; exit 1 and show what is stale")
    _json(verb)


def _prepare(verb: Parser) -> None:
    _specification(verb)
    verb.epilog = PREPARE_EPILOG
    verb.formatter_class = argparse.RawDescriptionHelpFormatter


def _launch(verb: Parser) -> None:
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
    verb.add_argument("--observe", type=Path, help=argparse.SUPPRESS)
    verb.add_argument("--dry-run", action="store_true", help="print file, environment and command; start nothing")
    verb.add_argument("--print-env", action="store_true", help="print the environment that torchrun needs, for eval")
    verb.usage = "%(prog)s STRATEGY|FILE [options] [-- [-m] SCRIPT ARGS]"
    verb.epilog = LAUNCH_EPILOG
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    _json(verb)


def _rehearse(verb: Parser) -> None:
    verb.add_argument("target", nargs="?", metavar="STRATEGY|FILE", help="a strategy, or any accelerate YAML file")
    verb.add_argument("--all", action="store_true", help="every strategy, one after the other")
    verb.add_argument("-n", "--num-processes", type=positive, metavar="N", help="processes on each machine")
    verb.add_argument("--keep-precision", action="store_true", help="compute in the asked precision, slow on CPUs")
    verb.add_argument("--junit", type=Path, metavar="FILE", help="write the answers as JUnit XML too")
    _specification(verb)
    _json(verb)


def _explain(verb: Parser) -> None:
    verb.add_argument(
        "target", metavar="STRATEGY|FILE", help="a strategy of the catalogue, or any accelerate YAML file"
    )
    _specification(verb)
    verb.add_argument("--num-processes", type=positive, metavar="N", help="processes on each machine")
    text = "a model of yours instead: a folder with a Hugging Face config.json, or pkg.module:factory"
    verb.add_argument("--model", metavar="MODEL", help=text)
    _json(verb)


def _checkpoints(verb: Parser) -> None:
    verb.add_argument("run", type=Path, metavar="RUN", help="a run directory, such as runs/fsdp-001")
    verb.add_argument("--verify", action="store_true", help="read every file; exit 1 if one is not what was written")
    text = "whether the newest loads under this strategy or accelerate file, and what changes; exit 1 if it does not"
    verb.add_argument("--for", dest="target", metavar="STRATEGY|FILE", help=text)
    verb.add_argument("--num-processes", type=positive, metavar="N", help="with --for: processes on each machine")
    _specification(verb)
    _json(verb)
