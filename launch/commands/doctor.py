"""`auto3d doctor`."""

from dataclasses import asdict

import click

from launch.commands.consoles import err, note, out
from launch.commands.exit_codes import RUN_FAILED
from launch.console.output import print_json, write_text
from launch.console.progress import doctor_progress
from launch.doctor.report import Verdict, report, show
from launch.recipe.load import load

DEFAULT_RECIPE = "tiny"


@click.command()
@click.argument("recipe", nargs=-1, metavar=f"[RECIPE={DEFAULT_RECIPE}] [OVERRIDES]...")
@click.option("--wait", "wait_s", type=click.FloatRange(min=0), default=300.0, show_default=True,
              help="Seconds that the probe's SLURM job may wait for its nodes.")  # fmt: skip
@click.option("--devices", is_flag=True,
              help="Also let all devices exchange messages and train a small model; takes a few minutes.")  # fmt: skip
@click.option("--report", "report_file", type=click.Path(dir_okay=False),
              help="Also write the result to this file, as Markdown for a bug report.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print a list of records, in bytes, seconds and Gbit/s.")
def doctor(recipe: tuple[str, ...], wait_s: float, devices: bool, report_file: str | None, as_json: bool) -> int:
    """Check what trials need, and say how to mend each fault.

    It checks this machine and, if RECIPE's trials run on SLURM, two nodes by a short job with the settings of the group
    launch. It also measures the speed of all-reduces. The exit code is 1 if any check finds an error.
    """
    name, overrides = (recipe[0], recipe[1:]) if recipe and "=" not in recipe[0] else (DEFAULT_RECIPE, recipe)
    loaded = load(name, overrides)
    # This import loads torch, which takes seconds, so a bad recipe is refused before it.
    from launch.doctor.all_checks import all_checks

    done = []
    with doctor_progress(err) as announce:
        for check in all_checks(loaded, devices=devices, wait_s=wait_s, announce=announce):
            done.append(check)
            if not as_json:
                show(check, out)
    if as_json:
        print_json([asdict(check) for check in done])
    if report_file:
        write_text(report_file, report(done, command=f"auto3d doctor {name}{' --devices' * devices}"))
        note(f"written: {report_file}")
    return RUN_FAILED if any(check.verdict == Verdict.ERROR for check in done) else 0
