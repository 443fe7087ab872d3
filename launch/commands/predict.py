"""`auto3d predict`."""

import click

from launch.commands.options import EXISTING_FILE, OUTPUT_FILE, recipe_command
from launch.recipe.load import load


@recipe_command
@click.option("--candidates", "file", type=EXISTING_FILE, help="A CSV file with one candidate per row.")
@click.option("--out", "out_file", type=OUTPUT_FILE, help="Write the rows with the predictions added.")
@click.option("--memory", is_flag=True, help="Say which tensors fill the memory of each device of one plan, and when.")
@click.option("--plan", "plan_file", type=EXISTING_FILE, help="With --memory: a plan's file. [the recipe's plan]")
@click.option("--svg", type=OUTPUT_FILE, help="With --memory: draw the memory of each device over time.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of records, in seconds and bytes.")
def predict(
    recipe: str,
    overrides: tuple[str, ...],
    file: str | None,
    out_file: str | None,
    memory: bool,
    plan_file: str | None,
    svg: str | None,
    as_json: bool,
) -> int:
    """Predict time and peak memory of each configuration in a CSV file.

    With --memory, predict which tensors fill the devices of one plan. Nothing runs in either case.

    The time is seconds per iteration, the memory bytes. The columns are micro_batch_size, tp, dp and pp, and optionally
    partition_cuts, schedule (as in interleaved-1f1b:chunks=2), recompute, and keys of the recipe, such as
    model.config.n_layer.
    """
    if memory == (file is not None):
        raise click.UsageError("give either --candidates FILE, or --memory for the recipe's plan")
    if memory and out_file:
        raise click.UsageError("--out is for --candidates; --memory writes --svg FILE")
    if not memory and (plan_file or svg):
        raise click.UsageError("--plan and --svg are for --memory")
    loaded = load(recipe, overrides)
    if memory:
        from launch.console.memory import print_memory

        print_memory(loaded, plan_file=plan_file, svg=svg, as_json=as_json)
        return 0
    from launch.console.predict import print_predictions

    assert file is not None
    print_predictions(loaded, file=file, out_file=out_file, as_json=as_json)
    return 0
