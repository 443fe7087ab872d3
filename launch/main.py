"""The command line. Exit codes: 0 done, 1 a run failed, 2 the input cannot be used, 130 interrupted."""

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tabulate import tabulate

from auto3d.errors import InputError
from launch.recipe import load
from launch.schema import documented_keys

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

RUN_FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def main() -> None:
    """Run the command, and turn every expected error into one line and an exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill is an interrupt
    try:
        code = cli.main(standalone_mode=False)
    except InputError as error:
        code = _complain(str(error), BAD_INPUT)
    except click.ClickException as error:
        code = _complain(error.format_message(), BAD_INPUT)
    except (KeyboardInterrupt, click.Abort):
        code = _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output is gone, as in `auto3d keys | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def _complain(message: str, code: int) -> int:
    print(f"auto3d: {message}", file=sys.stderr)
    return code


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Find, run and tabulate the fastest way to train a model with data, tensor and pipeline parallelism.

    RECIPE is the name of a file of recipes/, or a path to a .yaml file. OVERRIDES change single keys of it, as in
    training.global_batch=32; `auto3d keys` lists them all.
    """


def _recipe_command(function: Callable) -> Callable:
    """A command with the arguments that all commands on a recipe share."""
    function = click.argument("overrides", nargs=-1)(function)
    function = click.argument("recipe")(function)
    return cli.command(name=function.__name__.rstrip("_"))(function)


@_recipe_command
@click.option("--json", "as_json", is_flag=True, help="Print a list of records, each with its whole plan.")
def plan(recipe: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Print the candidates of RECIPE's search space, and why some were pruned. Trains nothing."""
    loaded = load(recipe, overrides)
    from launch.sweep import find_candidates, runnable

    found = find_candidates(loaded)
    if as_json:
        print(json.dumps([asdict(candidate) for candidate in found]))
        runnable(loaded, found)
        return 0
    headings = ["dp", "tp", "pp", "micro-\nbatch", "schedule", "pruned because"]
    print(tabulate([(c.dp, c.tp, c.pp, c.micro_batch_size, c.schedule, c.reason) for c in found], headings))
    print(f"\n{len(found)} candidates, {len(runnable(loaded, found))} to run")
    return 0


@_recipe_command
@click.option("--retry", is_flag=True, help="Run again the trials that failed or timed out.")
def sweep(recipe: str, overrides: tuple[str, ...], retry: bool) -> int:
    """Run every plan of RECIPE's search space as a trial, skip those that are done, and print the table."""
    loaded = load(recipe, overrides)
    from launch import tables
    from launch.progress import sweep_progress
    from launch.sweep import run_sweep

    try:
        with sweep_progress(err) as (on_start, on_end):
            run_sweep(loaded, retry=retry, on_start=on_start, on_end=on_end)
    except KeyboardInterrupt:
        return _complain("interrupted; finished trials are kept, and the same command runs the rest", INTERRUPTED)
    files = tables.write(loaded)
    print(f"{tables.terminal(loaded)}\n\nwritten: {', '.join(map(str, files))}")
    if tables.best(loaded) is None:
        return _complain("no trial is ok", RUN_FAILED)
    print(f"train under the fastest: auto3d train {recipe} --plan {files[-1]}")
    return 0


@_recipe_command
@click.option("--json", "as_json", is_flag=True, help="Print a list of records, in seconds and bytes.")
def table(recipe: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Print the table of RECIPE's finished trials, fastest first, and write it to results/."""
    loaded = load(recipe, overrides)
    from launch import tables

    if as_json:
        print(json.dumps(tables.rows(loaded)))
        return 0
    files = tables.write(loaded)
    print(f"{tables.terminal(loaded)}\n\nwritten: {', '.join(map(str, files))}")
    return 0


@_recipe_command
@click.option("--plan", "plan_file", type=click.Path(exists=True, dir_okay=False), help="Train under this plan.")
@click.option("--json", "as_json", is_flag=True, help="Print loss, grad_norm, iteration_s, peak_bytes and the plan.")
def train(recipe: str, overrides: tuple[str, ...], plan_file: str | None, as_json: bool) -> int:
    """Train RECIPE's model under --plan or the recipe's own plan, as in: auto3d train tiny plan.dp=2 plan.pp=2.

    It starts its own processes, or is one of those that torchrun, srun or mpirun started.
    """
    loaded = load(recipe, overrides)
    from launch.train import run_training

    return run_training(loaded, plan_file, err, lambda record: _print_training(record, as_json))


def _print_training(record: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(record))
        return
    plan = record["plan"]
    print(
        f"{len(record['loss'])} iterations under dp={plan['dp']} tp={plan['tp']} pp={plan['pp']} "
        f"micro-batch={plan['micro_batch_size']} {plan['schedule']}: loss {record['loss'][0]:.3f} to "
        f"{record['loss'][-1]:.3f}, {record['samples_per_s']:.1f} samples/s, "
        f"peak memory {max(record['peak_bytes']) / 2**20:.0f} MiB per rank (measured)"
    )


@cli.command()
def keys() -> int:
    """List every key of a recipe: its default, what it takes, and what it means."""
    table = Table()
    for heading in ("key", "default", "takes", "meaning"):
        table.add_column(heading, overflow="fold")
    for name, default, takes, meaning in documented_keys():
        table.add_row(name, escape(json.dumps(default)), takes, escape(meaning))
    out.print(table)
    return 0


if __name__ == "__main__":
    main()
