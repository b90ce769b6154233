"""The verbs. Each imports what it needs inside itself, so that `--help` stays quick.

argparse and not a larger library: with one, the start of every verb takes a tenth of a second longer.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from accel_parallel import __version__
from accel_parallel.cli.parser import Parser
from accel_parallel.cli.words import (
    checkpoints_words,
    config_words,
    explain_words,
    launch_words,
    prepare_words,
    rehearse_words,
)
from accel_parallel.output import Output, failing
from accel_parallel.verbs.export import add_arguments as add_export
from accel_parallel.verbs.generate import add_arguments as add_generate

DESCRIPTION = "One training loop for Hugging Face Accelerate; the parallelism is decided by generated YAML."


def run(argv: Sequence[str] | None) -> NoReturn:
    """Parse `argv`, by default the process's own, run its verb, and exit."""
    typed = list(sys.argv[1:] if argv is None else argv)
    # What stands after `--` is a script's, and none of it an option of ours.
    ours, script = (typed[: typed.index("--")], typed[typed.index("--") + 1 :]) if "--" in typed else (typed, [])
    arguments = parser().parse_args(ours)
    if script and arguments.verb not in ("launch", "rehearse"):
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
    config_words(_verb(verbs, config, "write an accelerate YAML file for every strategy from the specification"))
    explain_words(_verb(verbs, explain, "show which FSDP units a strategy or an accelerate file makes of a model"))
    rehearse_words(
        _verb(verbs, rehearse, "run a file on CPU processes, really sharded, and compare it with what it asks")
    )
    launch_words(_verb(verbs, launch, "train under a strategy, continuing its newest run"))
    prepare_words(_verb(verbs, prepare, "read, tokenise and cache the text, without training"))
    checkpoints_words(_verb(verbs, checkpoints, "list what a run has saved, verify it, or see where it loads"))
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
        script=tuple(arguments.script),
    )
    result = launch_target(request, output.say)
    output.end(result)


def rehearse(arguments: argparse.Namespace, output: Output) -> None:
    from accel_parallel.cli.rehearsing import Request
    from accel_parallel.cli.rehearsing import rehearse as rehearse_target

    request = Request(
        targets=tuple(arguments.targets),
        all=arguments.all,
        spec=arguments.spec,
        sets=tuple(arguments.set),
        num_processes=arguments.num_processes,
        keep_precision=arguments.keep_precision,
        junit=arguments.junit,
        scale=arguments.scale,
        script=tuple(arguments.script),
        fsdp_in_script=arguments.fsdp_in_script,
        against_ddp=arguments.against_ddp,
    )
    result = rehearse_target(request, output.say)
    output.end(result)


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
    output.end(result)


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
    output.end(result)


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
