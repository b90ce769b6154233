"""The verbs. Each imports what it needs inside itself, so that `--help` stays quick."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from accel_parallel.cli.output import failing

app = typer.Typer(
    name="accel-parallel",
    help="One training loop for Hugging Face Accelerate; the parallelism is decided by generated YAML.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

SpecOption = Annotated[
    Path | None,
    typer.Option("--spec", help="Specification; else $ACCEL_PARALLEL_SPEC, else accelerate_configs/parallelism.yaml."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key, such as training.steps=20."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="accel-parallel")


def _print_version(wanted: bool) -> None:
    if wanted:
        from accel_parallel import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def callback(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """One training loop for Hugging Face Accelerate; the parallelism is decided by generated YAML."""


@app.command()
def config(
    spec: SpecOption = None,
    sets: SetOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write to; the specification's own by default.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 and show what is stale.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write an accelerate YAML file for every strategy from the specification."""
    with failing("config", as_json) as output:
        from accel_parallel.cli.config import write_configs

        result = write_configs(spec, sets or [], out, check)
        output.finish(result.to_dict()["data"], result.lines(), result.problems, result.exit_code)


@app.command()
def launch(
    strategy: Annotated[str, typer.Argument(help="single, ddp or fsdp.")],
    spec: SpecOption = None,
    sets: SetOption = None,
    num_processes: Annotated[int | None, typer.Option(help="Processes on each machine.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use CPUs even where there are accelerators.")] = False,
    keep_precision: Annotated[bool, typer.Option("--keep-precision", help="On CPU, keep the asked precision.")] = False,
    run: Annotated[Path | None, typer.Option("--run", help="Run directory to start in or continue.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start a new run directory.")] = False,
    stop_at: Annotated[int | None, typer.Option(help="Save and stop after this step.", min=1)] = None,
    machine_rank: Annotated[int | None, typer.Option(help="This machine's number, with several.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the file and the command; start nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train under a strategy, continuing its newest run."""
    with failing("launch", as_json) as output:
        from accel_parallel.cli.launch import Request, launch_strategy

        request = Request(
            strategy=strategy,
            spec=spec,
            sets=tuple(sets or []),
            num_processes=num_processes,
            cpu=cpu,
            keep_precision=keep_precision,
            run=run,
            fresh=fresh,
            stop_at=stop_at,
            machine_rank=machine_rank,
            dry_run=dry_run,
        )
        result = launch_strategy(request, output.say)
        output.finish(result.data, result.lines, result.problems, result.exit_code)


@app.command()
def prepare(spec: SpecOption = None, sets: SetOption = None) -> None:
    """Read, tokenise and cache the text of the specification, without training."""
    import subprocess

    arguments = ["--spec", str(spec)] if spec else []
    for entry in sets or []:
        arguments += ["--set", entry]
    raise typer.Exit(subprocess.call([sys.executable, "-m", "accel_parallel.train.prepare", *arguments]))
