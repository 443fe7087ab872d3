"""`auto3d schedule`."""

from typing import Any

import click

from auto3d.schedule.options import RECOMPUTE, SYNC
from auto3d.schedule.order_file import read_order_file
from auto3d.schedule.order_text import NAME
from launch.commands.consoles import out
from launch.commands.options import EXISTING_FILE, OUTPUT_FILE
from launch.commands.schedule_synthesize import synthesize
from launch.console.schedule import print_comparison, print_families, print_schedule
from launch.model.simulated_schedule import ScheduleRequest

_TIME = click.FloatRange(min=0)


class _Schedule(click.Command):
    """`schedule NAME`, and `schedule synthesize PROBLEM`, a command with options of its own."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == [synthesize.name]:
            return synthesize.make_context(f"{info_name} {synthesize.name}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(cls=_Schedule)
@click.argument("name", required=False)
@click.option("--load", type=EXISTING_FILE, help="Take the schedule of a file that --save wrote, in place of NAME.")
@click.option("--list", "list_all", is_flag=True, help="Describe all schedules, their sources and their options.")
@click.option(
    "--compare", metavar="A,B,...", help="Print one row per schedule; chimera:scale=doubling sets one's own option."
)
@click.option("--stages", type=int, help="Pipeline depth: the number of devices that the model is spread over.")
@click.option("--micro-batches", type=int, help="Micro-batches per iteration.")
@click.option("--pipes", type=int, help="Copies of the model whose micro-batches cross the devices (chimera).")
@click.option("--scale", help="direct, doubling or halving: for more micro-batches than stages (chimera).")
@click.option("--chunks", type=int, help="Stages per device (interleaved-1f1b, interleaved-zero-bubble, looped-bfs).")
@click.option(
    "--group", type=int, help="Micro-batches on one chunk before the next (interleaved ones). [one per device]"
)
@click.option("--fewer", type=int, help="Devices, the last ones, with one stage less than --chunks (interleaved-1f1b).")
@click.option("--waves", type=int, help="How often the model passes the devices down and up (hanayo).")
@click.option("--slices", type=int, help="Slices of the sequence per micro-batch (seq1f1b).")
@click.option("--times", help="F-I-W-message to which the order is fitted (zb-1p, zb-2p). [the simulated times]")
@click.option("--deferred", type=int, help="Activations that weight halves need, in per cent (zb-1p, zb-2p).")
@click.option("--recompute", type=click.Choice(RECOMPUTE), help="Stages that recompute, where the schedule allows it.")
@click.option("--iterations", type=int, help="Iterations to simulate (asynchronous schedules).")
@click.option(
    "--sync-placement",
    type=click.Choice(SYNC),
    help="Gradient syncs run at the end, as soon as possible, or early only where they are hidden.",
)
@click.option("--forward", type=_TIME, help="Time of one micro-batch's forward on one device, all its stages. [1]")
@click.option("--backward", type=_TIME, help="Time of the backward. [the sum of its halves, or twice --forward]")
@click.option("--backward-input", type=_TIME, help="Time of its half for the gradient of the input. [the rest]")
@click.option("--backward-weight", type=_TIME, help="Time of its half for the gradient of the weights. [the rest]")
@click.option("--recompute-time", type=_TIME, help="Time of running the forward again. [--forward]")
@click.option("--p2p", type=_TIME, help="Time of one micro-batch's message from stage to stage. [0]")
@click.option("--overlap/--no-overlap", default=None, help="Whether messages overlap with compute. [they do]")
@click.option("--sync", type=_TIME, help="Time of the gradient sync of one device, all its stages. [0]")
@click.option("--tp", type=click.IntRange(min=1), default=1, help="Tensor-parallel ranks of each device. [1]")
@click.option(
    "--collectives",
    type=_TIME,
    help="Time of exposed tensor-parallel collectives in one forward, and again in one backward. [0]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures and all operations.")
@click.option("--save", type=OUTPUT_FILE, help="Write the order to a file for --load and plan.schedule_options.")
@click.option("--svg", type=OUTPUT_FILE, help="Write a picture.")
@click.option("--trace", type=OUTPUT_FILE, help="Write a trace for ui.perfetto.dev or chrome://tracing.")
@click.option("--csv", type=OUTPUT_FILE, help="Write the order of operations as torch.distributed.pipelining loads it.")
def schedule(
    name: str | None,
    load: str | None,
    list_all: bool,
    compare: str | None,
    stages: int | None,
    micro_batches: int | None,
    tp: int,
    as_json: bool,
    save: str | None,
    svg: str | None,
    trace: str | None,
    csv: str | None,
    **given: Any,
) -> int:
    """Simulate, compare and draw pipeline schedules.

    For example: auto3d schedule chimera --stages 4 --micro-batches 8. `auto3d schedule synthesize PROBLEM` finds the
    order for given times and memory; `auto3d schedule synthesize --help` lists its options.
    """
    if list_all:
        print_families(as_json)
        return 0
    if sum(choice is not None for choice in (name, load, compare)) != 1:
        raise click.UsageError("write one schedule's name, or --load FILE, or --compare A,B,..., or --list")
    if load is not None:
        name, stages, micro_batches = NAME, *_sizes_of(load, stages, micro_batches)
    if stages is None or micro_batches is None:
        raise click.UsageError("--stages and --micro-batches are needed, as in --stages 4 --micro-batches 8")
    named = (
        "pipes", "scale", "chunks", "group", "fewer", "waves", "slices", "times", "deferred", "recompute", "iterations",
    )  # fmt: skip
    option_of = {"sync_placement": "sync"} | {key: key for key in named}
    time_of = {"recompute_time": "recompute"} | {
        key: key
        for key in ("forward", "backward", "backward_input", "backward_weight", "p2p", "overlap", "sync", "collectives")
    }
    if tp == 1 and given["collectives"]:
        raise click.UsageError("--collectives are those of tensor parallelism: give --tp 2 or more, too")
    options = {option: given[key] for key, option in option_of.items() if given[key] is not None}
    if load is not None:
        if "recompute" in options:
            raise click.UsageError(f"--recompute: the order in {load} decides what recomputes")
        options = read_order_file(load).options | options
    request = ScheduleRequest(
        stages=stages,
        micro_batches=micro_batches,
        tp=tp,
        options=options,
        times={time: given[key] for key, time in time_of.items() if given[key] is not None},
    )
    files = {"save": save, "svg": svg, "trace": trace, "csv": csv}
    if name is not None:
        print_schedule(name, request, out, as_json=as_json, files=files)
        return 0
    assert compare is not None
    if any(files.values()):
        raise click.UsageError("--save, --svg, --trace and --csv write one schedule; --compare has several")
    print_comparison(compare.split(","), request, as_json=as_json)
    return 0


def _sizes_of(load: str, stages: int | None, micro_batches: int | None) -> tuple[int, int]:
    """The devices and micro-batches of the file ``load``; raises UsageError if others were given."""
    file = read_order_file(load)
    for flag, given, own in (
        ("--stages", stages, file.devices),
        ("--micro-batches", micro_batches, file.micro_batches),
    ):
        if given not in (None, own):
            raise click.UsageError(f"{flag}: found {given}; the order in {load} is for {own}")
    return file.devices, file.micro_batches
