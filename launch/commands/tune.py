"""`auto3d tune`."""

import click

from launch.commands import options
from launch.commands.consoles import err
from launch.commands.exit_codes import RUN_FAILED, complain
from launch.commands.options import load_for, recipe_command
from launch.commands.runs import interrupted, print_failed, run_in_background
from launch.console.progress import search_progress, sweep_progress
from launch.drivers import tune as tuning
from launch.drivers import tune_report
from launch.drivers.sweep import Retry, check_fewest_ranks, check_place, print_submissions
from launch.model.search import search_recipe
from launch.recipe.load import LoadedRecipe


@recipe_command
@options.retry
@options.dry_run
@options.test_only
@options.detach
@click.option("--no-profile", is_flag=True, help="Do not measure this machine first, even if it was never measured.")
def tune(
    recipe: str,
    overrides: tuple[str, ...],
    dry_run: bool,
    test_only: bool,
    retry: bool,
    detach: bool,
    no_profile: bool,
) -> int:
    """Search, try the best candidates, and write the fastest plan.

    It searches as `auto3d plan` does. If trials run on this machine, it first measures it once, as `auto3d profile`
    does. Each trial corrects the predictions for the remaining candidates; the fastest are tried again, in turns, until
    their order is certain. search.trials limits the number of trials; finished ones never run twice. The fastest plan
    goes to tables/. --dry-run and --test-only are about the first trial only, since the others depend on its result.
    """
    loaded = load_for("tune", recipe, overrides)
    if detach:
        return run_in_background(loaded, "tune", *["--retry"] * retry, *["--no-profile"] * no_profile)
    if dry_run or test_only:
        print_submissions(
            loaded, lambda recipe: [tuning.first_trial(recipe, search_recipe(recipe))], ask_slurm=test_only
        )
        return 0
    return tune_on(loaded, Retry.ALL if retry else Retry.NONE, profile=not no_profile)


def tune_on(loaded: LoadedRecipe, retry: Retry, *, profile: bool = True) -> int:
    """Search, run the trials, print and write the table; returns the exit code."""
    check_place(loaded, "tune")
    check_fewest_ranks(loaded, "tune")
    try:
        if profile:
            tuning.measure_if_unknown(loaded, err)
        with search_progress(err) as tell:
            search = search_recipe(loaded, tell)
        with sweep_progress(err) as watcher:
            tried = tuning.run_tune(loaded, search, watcher, retry=retry)
    except KeyboardInterrupt:
        return interrupted(loaded)
    summary = tune_report.summary(loaded, search, tried)
    files = tune_report.write(loaded, tried, summary)
    print(f"{tune_report.table(loaded, tried, 'simple')}\n\n{summary}\n\nwritten: {', '.join(map(str, files))}")
    print_failed(loaded, "tune", [measurement for plan in tried for measurement in plan.measurements])
    if tuning.fastest(tried) is None:
        return complain("no trial succeeded", RUN_FAILED)
    print(f"to train under the fastest plan: {loaded.command('train', '--plan', str(files[-1]), without='plan')}")
    return 0
