"""The commands that need no recipe: schedule and keys."""

import json
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from auto3d.schedule.options import RECOMPUTE, SYNC
from launch.commands.group import cli, out
from launch.recipe.keys import documented_keys

_TIME = click.FloatRange(min=0)
_FILE = click.Path(dir_okay=False)


@cli.command()
@click.argument("name", required=False)
@click.option("--list", "list_all", is_flag=True, help="Describe all schedules and their options.")
@click.option("--compare", metavar="A,B,...", help="A row for each; chimera:scale=doubling gives one its own option.")
@click.option("--stages", type=int, help="Pipeline depth: how many devices the model is laid over.")
@click.option("--micro-batches", type=int, help="Micro-batches per iteration.")
@click.option("--pipes", type=int, help="Replicas of the model that flow through the devices (chimera).")
@click.option("--scale", help="direct, doubling or halving: chimera with more micro-batches than stages.")
@click.option("--chunks", type=int, help="Stages per device (interleaved-1f1b).")
@click.option("--recompute", type=click.Choice(RECOMPUTE), help="All stages or none, where the choice is free.")
@click.option("--iterations", type=int, help="Iterations to run, of an asynchronous schedule.")
@click.option("--sync-placement", type=click.Choice(SYNC), help="At the end, at once, or at once where it hides.")
@click.option("--forward", type=_TIME, help="Time of one device's share of the model for one micro-batch. [1]")
@click.option("--backward", type=_TIME, help="The same of the backward. [the sum of its halves, or twice --forward]")
@click.option("--backward-input", type=_TIME, help="Its half for the gradient of the input. [the rest]")
@click.option("--backward-weight", type=_TIME, help="Its half for the gradient of the weights. [the rest]")
@click.option("--recompute-time", type=_TIME, help="Of running the forward again. [--forward]")
@click.option("--p2p", type=_TIME, help="Of a message of one micro-batch from stage to stage. [0]")
@click.option("--overlap/--no-overlap", default=None, help="Whether messages travel beside compute. [they do]")
@click.option("--sync", type=_TIME, help="Of the gradient sync of one device's share. [0]")
@click.option("--json", "as_json", is_flag=True, help="Print the figures and all operations.")
@click.option("--svg", type=_FILE, help="Write a picture.")
@click.option("--trace", type=_FILE, help="Write a trace for ui.perfetto.dev or chrome://tracing.")
@click.option("--csv", type=_FILE, help="Write the order in the form that torch.distributed.pipelining loads.")
def schedule(
    name: str | None,
    list_all: bool,
    compare: str | None,
    stages: int | None,
    micro_batches: int | None,
    as_json: bool,
    svg: str | None,
    trace: str | None,
    csv: str | None,
    **given: Any,
) -> int:
    """Simulate and draw pipeline schedule NAME, as in: auto3d schedule chimera --stages 4 --micro-batches 8."""
    from launch.console.schedule import Request, print_comparison, print_families, print_schedule

    if list_all:
        print_families(as_json)
        return 0
    if (name is None) == (compare is None):
        raise click.UsageError("write one schedule's name, or --compare A,B,..., or --list")
    if stages is None or micro_batches is None:
        raise click.UsageError("--stages and --micro-batches are needed, as in --stages 4 --micro-batches 8")
    families = {"pipes": "pipes", "scale": "scale", "chunks": "chunks", "recompute": "recompute"}
    families |= {"iterations": "iterations", "sync_placement": "sync"}
    times = {"recompute_time": "recompute"} | {
        key: key for key in ("forward", "backward", "backward_input", "backward_weight", "p2p", "overlap", "sync")
    }
    request = Request(
        stages=stages,
        micro_batches=micro_batches,
        options={option: given[key] for key, option in families.items() if given[key] is not None},
        times={time: given[key] for key, time in times.items() if given[key] is not None},
    )
    files = {"svg": svg, "trace": trace, "csv": csv}
    if name is not None:
        print_schedule(name, request, out, as_json=as_json, files=files)
        return 0
    if any(files.values()):
        raise click.UsageError("--svg, --trace and --csv write one schedule; --compare has several")
    print_comparison(compare.split(","), request, as_json=as_json)
    return 0


@cli.command()
def keys() -> int:
    """List every key of a recipe: its default, what it takes, and what it means."""
    if not out.is_terminal:
        for name, default, takes, meaning in documented_keys():
            print(name, json.dumps(default), takes, meaning, sep="\t")
        return 0
    table = Table()
    table.add_column("key", no_wrap=True)
    for heading in ("default", "takes", "meaning"):
        table.add_column(heading, overflow="fold")
    for name, default, takes, meaning in documented_keys():
        table.add_row(name, escape(json.dumps(default)), takes, escape(meaning))
    out.print(table)
    return 0
