"""`auto3d train`."""

import os
from functools import partial

import click

from launch.commands import options
from launch.commands.consoles import err
from launch.commands.exit_codes import RUN_FAILED
from launch.commands.options import EXISTING_FILE, recipe_command
from launch.commands.runs import interrupted, next_commands, run_in_background
from launch.console.progress import sweep_progress
from launch.console.training import print_spec, print_training
from launch.drivers.sweep import print_submissions
from launch.recipe.load import LoadedRecipe, load
from launch.slurm.executor import on_slurm


@recipe_command
@click.option("--plan", "plan_file", type=EXISTING_FILE, help="Train under the plan in this file.")
@click.option("--fresh", is_flag=True, help="Start from the beginning, even if there are checkpoints.")
@click.option("--json", "as_json", is_flag=True, help="Print loss, grad_norm, iteration_s, bytes and the plan.")
@click.option("--trace", is_flag=True, help="Trace one iteration after the warm-up; others: training.trace=[3,10].")
@click.option("--check", is_flag=True, help="Check the programs of all ranks against a table of rules; train nothing.")
@options.dry_run
@options.test_only
@options.detach
def train(
    recipe: str,
    overrides: tuple[str, ...],
    plan_file: str | None,
    fresh: bool,
    as_json: bool,
    trace: bool,
    check: bool,
    dry_run: bool,
    test_only: bool,
    detach: bool,
) -> int:
    """Train RECIPE's model.

    The plan is --plan or the recipe's own, as in: auto3d train tiny plan.dp=2 plan.pp=2. The command starts its own
    processes, joins those that torchrun, srun or mpirun started, or submits a job to SLURM. It continues from the
    newest checkpoint; training.checkpoint_every says how often one is written.
    """
    loaded = load(recipe, (*overrides, "training.trace=[0]") if trace else overrides)
    if check:
        from launch.drivers.planned_training import check_spec

        broken = check_spec(loaded, plan_file, err)
        print_spec(broken, as_json=as_json)
        return RUN_FAILED if any(broken.values()) else 0
    if dry_run or test_only:
        from launch.drivers.planned_training import plan_training  # it imports torch, as in train_on

        print_submissions(loaded, lambda recipe: [plan_training(recipe, plan_file, err).trial], ask_slurm=test_only)
        return 0
    return train_on(loaded, plan_file, fresh=fresh, as_json=as_json, detach=detach)


def train_on(
    loaded: LoadedRecipe, plan_file: str | None, *, fresh: bool = False, as_json: bool = False, detach: bool = False
) -> int:
    """Train under ``plan_file`` or the recipe's own plan, and print the result; returns the exit code."""
    if loaded.values.training.trace:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # no lines of torch.profiler, which reads it when it is loaded
    # These import torch, which takes seconds: --help and a refused recipe are quick without it.
    from auto3d.runtime.process.joined import joined_world
    from launch.drivers.planned_training import plan_training
    from launch.drivers.train import run_as_job, run_training
    from launch.watch.outlets import check_outlets

    check_outlets(loaded)
    world = joined_world()
    if world is None and detach and not on_slurm(loaded):
        arguments = [*(["--plan", plan_file] if plan_file else []), *["--fresh"] * fresh]
        trial = plan_training(loaded, plan_file, err).trial
        return run_in_background(loaded, "train", *arguments, plan_file=plan_file, trials=[trial.name])
    on_result = partial(print_training, as_json=as_json)
    if world is not None or not on_slurm(loaded):
        return run_training(loaded, plan_file, world, err, on_result, fresh=fresh)
    try:
        with sweep_progress(err) as watcher:
            code = run_as_job(loaded, plan_file, err, watcher, on_result, fresh=fresh, follow=not detach)
    except KeyboardInterrupt:
        return interrupted(loaded)
    if detach:
        print(next_commands(loaded))
    return code
