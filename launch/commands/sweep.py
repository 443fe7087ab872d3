"""`auto3d sweep`."""

from auto3d.runtime.measurement import Status
from launch.commands import options
from launch.commands.consoles import err
from launch.commands.exit_codes import RUN_FAILED, complain
from launch.commands.options import load_for, recipe_command
from launch.commands.runs import interrupted, next_commands, print_failed, run_in_background
from launch.console import tables
from launch.console.progress import sweep_progress
from launch.drivers.sweep import Retry, left_of, print_submissions, run_sweep
from launch.recipe.load import LoadedRecipe
from launch.slurm.executor import on_slurm


@recipe_command
@options.retry
@options.dry_run
@options.test_only
@options.detach
def sweep(recipe: str, overrides: tuple[str, ...], dry_run: bool, test_only: bool, retry: bool, detach: bool) -> int:
    """Run every plan of RECIPE's search space as a trial.

    Trials that have ended are skipped. The table of all results is printed and written to tables/.
    """
    loaded = load_for("sweep", recipe, overrides)
    which = Retry.ALL if retry else Retry.NONE
    if dry_run or test_only:
        print_submissions(loaded, lambda recipe: left_of(recipe, which), ask_slurm=test_only)
        return 0
    if detach and not on_slurm(loaded):
        return run_in_background(loaded, "sweep", *["--retry"] * retry)
    return sweep_on(loaded, which, follow=not detach)


def sweep_on(loaded: LoadedRecipe, retry: Retry, *, follow: bool = True) -> int:
    """Run the trials, print and write the table; returns the exit code."""
    try:
        with sweep_progress(err) as watcher:
            sweep = run_sweep(loaded, retry=retry, watcher=watcher, follow=follow)
    except KeyboardInterrupt:
        return interrupted(loaded)
    if not follow:
        print(next_commands(loaded))
        return 0
    results = tables.results(
        loaded,
        list(sweep.ended().values()),
        len(sweep.trials) + len(sweep.infeasible),
        sweep.left_out,
        predicted_s=sweep.predictions.seconds,
        predicted_on=sweep.predictions.based_on,
        profiled=sweep.predictions.profiled,
        candidates=sweep.candidates,
    )
    files = tables.write(results)
    print(f"{tables.terminal(results)}\n\nwritten: {', '.join(map(str, files))}")
    print_failed(loaded, "sweep", results.measurements)
    if not any(measurement.status is Status.OK for measurement in results.measurements):
        return complain("no trial succeeded", RUN_FAILED)
    if tables.best(results) is not None:
        print(f"to train under the fastest plan: {loaded.command('train', '--plan', str(files[-1]), without='plan')}")
    return 0
