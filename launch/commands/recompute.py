"""`auto3d recompute`."""

from typing import TYPE_CHECKING

import click

from launch.commands.consoles import note
from launch.commands.exit_codes import RUN_FAILED, complain
from launch.commands.options import recipe_command
from launch.console.output import print_json
from launch.recipe.load import load

if TYPE_CHECKING:
    from launch.drivers.recompute import TriedFraction


@recipe_command
@click.option("--json", "as_json", is_flag=True, help="Print the fraction and the status of each one that was tried.")
def recompute(recipe: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Find how little RECIPE's plan must recompute to fit into memory.

    Short real trials find the largest fraction of the first stage that need not be recomputed.
    """
    loaded = load(recipe, overrides)
    from launch.drivers.recompute import try_fractions  # imports torch, which takes seconds: after the recipe is loaded

    tried: list[TriedFraction] = []

    def report(attempt: "TriedFraction") -> None:
        tried.append(attempt)
        measurement = attempt.measurement
        outcome = f"fits, {measurement.median_s:.3f} s/iteration" if attempt.fits else f"{measurement.status}\n"
        note(f"recompute={attempt.fraction!r}: {outcome}{measurement.error}")

    fraction = try_fractions(loaded, report)
    if as_json:
        records = [{"recompute": attempt.fraction, "status": attempt.measurement.status} for attempt in tried]
        print_json({"recompute": fraction, "tried": records})
    elif fraction is not None:
        print(f"the largest that fits: {loaded.command('train', f'plan.recompute={fraction!r}')}")
    return 0 if fraction is not None else complain("no fraction fits, or a trial failed", RUN_FAILED)
