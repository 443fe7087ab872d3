"""`auto3d schedule synthesize`."""

import click

from launch.commands.consoles import err, out
from launch.commands.options import EXISTING_FILE, OUTPUT_FILE


@click.command()
@click.argument("problem", type=EXISTING_FILE)
@click.option("--seconds", type=click.FloatRange(min=0.1), default=10.0, help="Time of the search. [10]")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the search. [0]")
@click.option("--json", "as_json", is_flag=True, help="Print the figures and all operations.")
@click.option("--save", type=OUTPUT_FILE, help="Write the order to a file for --load and plan.schedule_options.")
@click.option("--svg", type=OUTPUT_FILE, help="Write a picture.")
@click.option("--trace", type=OUTPUT_FILE, help="Write a trace for ui.perfetto.dev or chrome://tracing.")
@click.option("--csv", type=OUTPUT_FILE, help="Write the order of operations as torch.distributed.pipelining loads it.")
def synthesize(
    problem: str,
    seconds: float,
    seed: int,
    as_json: bool,
    save: str | None,
    svg: str | None,
    trace: str | None,
    csv: str | None,
) -> int:
    """Find the order of operations that takes the least time in the memory of each device.

    PROBLEM is a YAML or JSON file with devices, micro_batches, times, bytes and memory (docs/synthesis.md), as in:
    auto3d schedule synthesize problem.yaml --seconds 10 --save order.json.
    """
    from launch.console.synthesis import print_synthesis  # it compiles the search, which takes seconds

    files = {"save": save, "svg": svg, "trace": trace, "csv": csv}
    print_synthesis(problem, out, err, seconds=seconds, seed=seed, as_json=as_json, files=files)
    return 0
