"""Commands on what is under way: how it stands, what it prints, its end, and to go on with it; and the doctor."""

from dataclasses import asdict

import click

from launch.commands.group import PLAIN, RUN_FAILED, cli, err, out, recipe_command
from launch.commands.trials import sweep_on, train_on, tune_on
from launch.console.output import print_json, write_text
from launch.recipe.load import load

DEFAULT_RECIPE = "tiny"


@recipe_command
def resume(recipe: str, overrides: tuple[str, ...]) -> int:
    """Go on with the last sweep, tune or detached training of RECIPE: follow what runs, run what is left or failed.

    A trial that failed or timed out is started launch.attempts times at most; a training goes on from its newest
    checkpoint. A job that SLURM queued again although its trial has ended is cancelled. OVERRIDES, if any, replace
    those of that command.
    """
    from launch.drivers.status import resumed, trained_here

    loaded, command = resumed(load(recipe, overrides))
    from launch.drivers.sweep import Retry
    from launch.executors.submit import cancel_listed_again
    from launch.slurm.executor import check_reachable, on_slurm

    check_reachable(loaded)
    if on_slurm(loaded):
        cancel_listed_again(loaded)
    if command.verb == "train":
        if not overrides and trained_here(loaded, command):
            print(f"done already; to train anew: {loaded.command('train', '--fresh')}")
            return 0
        return train_on(loaded, command.plan_file)
    return (tune_on if command.verb == "tune" else sweep_on)(loaded, Retry.UP_TO_A_LIMIT)


@recipe_command
@click.option("--watch", is_flag=True, help="Say what changes, until no trial is under way.")
def status(recipe: str, overrides: tuple[str, ...], watch: bool) -> int:
    """Say where the trials of RECIPE's last sweep or tune stand: done, running, waiting, lost."""
    loaded = load(recipe, overrides)
    from launch.drivers import status as standing

    found = standing.watch(loaded, err) if watch else standing.standings(loaded)
    print(f"{standing.table(found)}\n\n{standing.summary(found)}")
    return 0


@cli.command()
@click.argument("recipe")
@click.argument("trial")
@click.option("-f", "--follow", is_flag=True, help="Go on until the trial has ended.")
def logs(recipe: str, trial: str, follow: bool) -> int:
    """Print what TRIAL, or the one trial that has TRIAL in its name, printed, and how it ended."""
    loaded = load(recipe)
    from launch.drivers.status import print_logs

    print_logs(loaded, trial, follow=follow)
    return 0


@cli.command()
@click.argument("recipe")
@click.argument("trial", required=False)
def cancel(recipe: str, trial: str | None) -> int:
    """End the trials of RECIPE that are under way, or TRIAL alone; `resume` runs them again."""
    loaded = load(recipe)
    from launch.drivers.background import end_driver
    from launch.drivers.status import cancel_trials

    if trial is None and (pid := end_driver(loaded)) is not None:
        print(f"asked process {pid}, which ran trials in the background, to end")
    cancelled = cancel_trials(loaded, trial)
    print(f"cancelled {len(cancelled)} jobs of SLURM{': ' * bool(cancelled)}{', '.join(cancelled)}")
    return 0


@cli.command()
@click.argument("recipe", nargs=-1, metavar=f"[RECIPE={DEFAULT_RECIPE}] [OVERRIDES]...")
@click.option("--wait", "wait_s", type=click.FloatRange(min=0), default=300.0, show_default=True,
              help="Seconds that the probe's job may wait for its nodes.")  # fmt: skip
@click.option("--devices", is_flag=True,
              help="Also let all devices exchange messages and train a small model: a few minutes.")  # fmt: skip
@click.option("--report", "report_file", type=click.Path(dir_okay=False),
              help="Also write what is found to this file, as Markdown for a bug report.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print a list of records, in bytes, seconds and Gbit/s.")
def doctor(recipe: tuple[str, ...], wait_s: float, devices: bool, report_file: str | None, as_json: bool) -> int:
    """Check what trials need, and say of each fault what to do; measure how fast ranks sum.

    On this machine, and, where trials of RECIPE run on SLURM, by a short job on two nodes, which takes the group launch
    as they do. The exit code is 1 if anything is an error.
    """
    name, overrides = (recipe[0], recipe[1:]) if recipe and "=" not in recipe[0] else (DEFAULT_RECIPE, recipe)
    loaded = load(name, overrides)
    from launch.console.progress import doctor_progress
    from launch.doctor.checks import Verdict, report, show
    from launch.doctor.doctor import checks

    found = []
    with doctor_progress(err) as tell:
        for check in checks(loaded, devices=devices, wait_s=wait_s, tell=tell):
            found.append(check)
            if not as_json:
                show(check, out)
    if as_json:
        print_json([asdict(check) for check in found])
    if report_file:
        write_text(report_file, report(found, command=f"auto3d doctor {name}{' --devices' * devices}"))
        err.print(f"written: {report_file}", **PLAIN)
    return RUN_FAILED if any(check.verdict == Verdict.ERROR for check in found) else 0
