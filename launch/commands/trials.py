"""Commands that run plans for real: sweep, tune, train, recompute, and the table of what ran."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from launch.commands.group import PLAIN, RUN_FAILED, err, recipe_command
from launch.console.output import print_json
from launch.main import INTERRUPTED, complain
from launch.recipe.load import LoadedRecipe, load

if TYPE_CHECKING:
    from auto3d.runtime.measurement import Measurement
    from launch.drivers.sweep import Retry

_retry = click.option("--retry", is_flag=True, help="Run again the trials that failed or timed out.")
_detach = click.option("--detach", is_flag=True, help="Return once it is under way, and say how to follow it.")
_dry_run = click.option("--dry-run", is_flag=True, help="Print the sbatch text of its jobs, and submit none.")
_test_only = click.option(
    "--test-only", is_flag=True, help="Ask SLURM whether it would take its jobs, and submit none."
)


@recipe_command
@_retry
@_dry_run
@_test_only
@_detach
@click.option("--no-profile", is_flag=True, help="Do not measure this machine first, where nothing has measured it.")
def tune(
    recipe: str,
    overrides: tuple[str, ...],
    dry_run: bool,
    test_only: bool,
    retry: bool,
    detach: bool,
    no_profile: bool,
) -> int:
    """Search as `plan` does, then try the best candidates, and write the fastest plan to results/.

    It first measures this machine as `profile` does, once, where trials run here. Each trial corrects what is predicted
    for those that are left; the fastest are tried again, in turns, until their order is certain. search.trials is how
    many run at most; finished ones never run twice. --dry-run and --test-only are of the first, for the others depend
    on it.
    """
    loaded = load(recipe, overrides)
    if detach:
        return _start_driver(loaded, "tune", *["--retry"] * retry, *["--no-profile"] * no_profile)
    from launch.drivers.sweep import Retry, print_submissions

    if dry_run or test_only:
        from launch.drivers.tune import first_trial
        from launch.model.search import search_recipe

        print_submissions(loaded, lambda recipe: [first_trial(recipe, search_recipe(recipe))], ask_slurm=test_only)
        return 0
    return tune_on(loaded, Retry.ALL if retry else Retry.NONE, profile=not no_profile)


def tune_on(loaded: LoadedRecipe, retry: "Retry", *, profile: bool = True) -> int:
    from launch.console.progress import search_progress, sweep_progress
    from launch.drivers import tune as tuning
    from launch.model.search import search_recipe

    try:
        if profile:
            tuning.measure_if_unknown(loaded, err)
        with search_progress(err) as tell:
            search = search_recipe(loaded, tell)
        with sweep_progress(err) as watcher:
            tried = tuning.run_tune(loaded, search, watcher, retry=retry)
    except KeyboardInterrupt:
        return _interrupted(loaded)
    files = tuning.write(loaded, search, tried)
    told = tuning.told(loaded, search, tried)
    print(f"{tuning.table(tried, 'simple')}\n\n{told}\n\nwritten: {', '.join(map(str, files))}")
    _tell_failed(loaded, "tune", [measurement for one in tried for measurement in one.measurements])
    if tuning.fastest(tried) is None:
        return complain("no trial is ok", RUN_FAILED)
    print(f"train under the fastest: {loaded.command('train', '--plan', str(files[-1]), without='plan')}")
    return 0


@recipe_command
@_retry
@_dry_run
@_test_only
@_detach
def sweep(recipe: str, overrides: tuple[str, ...], dry_run: bool, test_only: bool, retry: bool, detach: bool) -> int:
    """Run every plan of RECIPE's search space as a trial, skip those that are done, and print the table."""
    loaded = load(recipe, overrides)
    from launch.drivers.sweep import Retry, left_of, print_submissions
    from launch.slurm.executor import on_slurm

    which = Retry.ALL if retry else Retry.NONE
    if dry_run or test_only:
        print_submissions(loaded, lambda recipe: left_of(recipe, which), ask_slurm=test_only)
        return 0
    if detach and not on_slurm(loaded):
        return _start_driver(loaded, "sweep", *["--retry"] * retry)
    return sweep_on(loaded, which, follow=not detach)


def sweep_on(loaded: LoadedRecipe, retry: "Retry", *, follow: bool = True) -> int:
    from launch.console import tables
    from launch.console.progress import sweep_progress
    from launch.drivers.sweep import run_sweep

    try:
        with sweep_progress(err) as watcher:
            sweep = run_sweep(loaded, retry=retry, watcher=watcher, follow=follow)
    except KeyboardInterrupt:
        return _interrupted(loaded)
    if not follow:
        print(next_commands(loaded))
        return 0
    results = tables.results(loaded, list(sweep.ended().values()), len(sweep.trials), sweep.left_out)
    files = tables.write(results)
    print(f"{tables.terminal(results)}\n\nwritten: {', '.join(map(str, files))}")
    _tell_failed(loaded, "sweep", results.measurements)
    if tables.best(results) is None:
        return complain("no trial is ok", RUN_FAILED)
    print(f"train under the fastest: {loaded.command('train', '--plan', str(files[-1]), without='plan')}")
    return 0


def _tell_failed(loaded: LoadedRecipe, verb: str, measurements: Sequence["Measurement"]) -> None:
    from launch.store.watcher import FINAL

    if failed := sum(one.status not in FINAL for one in measurements):
        err.print(f"{failed} failed or timed out; to run them again: {loaded.command(verb, '--retry')}", **PLAIN)


def _start_driver(
    loaded: LoadedRecipe, verb: str, *options: str, plan_file: str | None = None, trials: Sequence[str] = ()
) -> int:
    from launch.drivers.background import start_driver
    from launch.drivers.sweep import check_place

    check_place(loaded)
    pid, log = start_driver(loaded, verb, options, plan_file=plan_file, trials=trials)
    print(f"process {pid} runs it, and prints to {log}\n{next_commands(loaded)}")
    return 0


def next_commands(loaded: LoadedRecipe) -> str:
    told = {
        ("status", "--watch"): "where its trials stand, until all have ended",
        ("logs", "TRIAL", "-f"): "what one prints",
        ("cancel",): "end all that are under way",
        ("resume",): "follow them, run what is left or failed, and print the table",
    }
    commands = {loaded.follow_up(verb, *options): meaning for (verb, *options), meaning in told.items()}
    width = max(map(len, commands))
    return "\n".join(f"  {command:{width}}  # {meaning}" for command, meaning in commands.items())


def _interrupted(loaded: LoadedRecipe) -> int:
    from launch.slurm.executor import on_slurm

    if on_slurm(loaded):
        err.print(f"interrupted; jobs of SLURM go on:\n{next_commands(loaded)}", **PLAIN)
        return INTERRUPTED
    return complain("interrupted; finished trials are kept, and the same command runs the rest", INTERRUPTED)


@recipe_command
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print a list of records, in seconds and bytes, each with its plan and its error; write no file.",
)
def table(recipe: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Print the table of RECIPE's last sweep, fastest first, and write it to results/.

    OVERRIDES, if any, must be those of that sweep.
    """
    loaded = load(recipe, overrides)
    from launch.console import tables

    results = tables.results_of(loaded)
    if as_json:
        print_json(tables.rows(results))
        return 0
    files = tables.write(results)
    print(f"{tables.terminal(results)}\n\nwritten: {', '.join(map(str, files))}")
    return 0


@recipe_command
@click.option("--plan", "plan_file", type=click.Path(exists=True, dir_okay=False), help="Train under this plan.")
@click.option("--fresh", is_flag=True, help="Begin anew, whatever checkpoints there are.")
@click.option("--json", "as_json", is_flag=True, help="Print loss, grad_norm, iteration_s, bytes and the plan.")
@_dry_run
@_test_only
@_detach
def train(
    recipe: str,
    overrides: tuple[str, ...],
    plan_file: str | None,
    fresh: bool,
    as_json: bool,
    dry_run: bool,
    test_only: bool,
    detach: bool,
) -> int:
    """Train RECIPE's model under --plan or the recipe's own plan, as in: auto3d train tiny plan.dp=2 plan.pp=2.

    It starts its own processes, is one of those that torchrun, srun or mpirun started, or has SLURM start them. It goes
    on from the newest checkpoint: training.checkpoint_every says when one is written.
    """
    loaded = load(recipe, overrides)
    if dry_run or test_only:
        from launch.drivers.sweep import print_submissions
        from launch.drivers.train import planned

        print_submissions(loaded, lambda recipe: [planned(recipe, plan_file, err).trial], ask_slurm=test_only)
        return 0
    return train_on(loaded, plan_file, fresh=fresh, as_json=as_json, detach=detach)


def train_on(
    loaded: LoadedRecipe, plan_file: str | None, *, fresh: bool = False, as_json: bool = False, detach: bool = False
) -> int:
    from auto3d.runtime.joined import joined_world
    from launch.console.progress import sweep_progress
    from launch.drivers.train import planned, run_as_job, run_training
    from launch.slurm.executor import on_slurm

    world = joined_world()
    if world is None and detach and not on_slurm(loaded):
        options = [*(["--plan", plan_file] if plan_file else []), *["--fresh"] * fresh]
        trial = planned(loaded, plan_file, err).trial
        return _start_driver(loaded, "train", *options, plan_file=plan_file, trials=[trial.name])
    on_result = partial(_print_training, as_json=as_json)
    if world is not None or not on_slurm(loaded):
        return run_training(loaded, plan_file, world, err, on_result, fresh=fresh)
    try:
        with sweep_progress(err) as watcher:
            code = run_as_job(loaded, plan_file, err, watcher, on_result, fresh=fresh, follow=not detach)
    except KeyboardInterrupt:
        return _interrupted(loaded)
    if detach:
        print(next_commands(loaded))
    return code


def _print_training(record: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(record)
        return
    plan = record["plan"]
    if not record["iteration_s"]:
        print("it was done already when its job started")
        return
    under = (
        f"{len(record['iteration_s'])} iterations under dp={plan['dp']} tp={plan['tp']} pp={plan['pp']} "
        f"micro-batch={plan['micro_batch_size']} {plan['schedule']}"
    )
    if record["emulated"]:
        print(f"{under}: {record['samples_per_s']:.1f} samples/s (emulated, not measured: nothing was computed)")
        return
    print(
        f"{under}: loss {record['loss'][0]:.3f} to {record['loss'][-1]:.3f}, {record['samples_per_s']:.1f} samples/s, "
        f"{_memory(record)}"
    )


def _memory(record: dict[str, Any]) -> str:
    """Measured peak memory of the fullest rank, and what was predicted."""
    peak, used, predicted = (
        f"{max(record[name], default=0) / 2**20:.0f} MiB" for name in ("peak_bytes", "used_bytes", "predicted_bytes")
    )
    if not record["used_bytes"]:  # a CPU
        return f"peak memory {peak} per rank (measured; {predicted} predicted)"
    return f"peak memory {peak} per rank, {used} used on its device (measured; {predicted} predicted)"


@recipe_command
@click.option("--json", "as_json", is_flag=True, help="Print the share and what was tried, each with its status.")
def recompute(recipe: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Find by short real trials the largest share of RECIPE's plan that need not be recomputed for lack of memory."""
    loaded = load(recipe, overrides)
    from launch.drivers.recompute import Tried, try_shares

    tried: list[Tried] = []

    def report(one: Tried) -> None:
        tried.append(one)
        measurement = one.measurement
        told = f"fits, {measurement.median_s:.3f} s/iteration" if one.fits else f"{measurement.status}\n"
        err.print(f"recompute={one.share!r}: {told}{measurement.error}", **PLAIN)

    share = try_shares(loaded, report)
    if as_json:
        records = [{"recompute": one.share, "status": one.measurement.status} for one in tried]
        print_json({"recompute": share, "tried": records})
    elif share is not None:
        print(f"the largest that fits: {loaded.command('train', f'plan.recompute={share!r}')}")
    return 0 if share is not None else complain("no share fits, or a trial failed", RUN_FAILED)
