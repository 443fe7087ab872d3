"""The commands: what each takes, and what it prints."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from auto3d.schedule.options import RECOMPUTE, SYNC
from launch.main import INTERRUPTED, complain
from launch.output import print_json
from launch.recipe import LoadedRecipe, load
from launch.schema import documented_keys

if TYPE_CHECKING:
    from launch.sweep import Retry

RUN_FAILED = 1


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich calls this where it caught a BrokenPipeError, and would exit by itself


_PLAIN = {"markup": False, "soft_wrap": True}
out = _Console(highlight=False)
err = _Console(stderr=True, highlight=False)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(package_name="auto3d", message="auto3d %(version)s")
@click.pass_context
def cli(context: click.Context) -> int:
    """Find, run and tabulate the fastest way to train a model with data, tensor and pipeline parallelism.

    RECIPE is the name of a file of recipes/, or a path to a .yaml file. OVERRIDES change single keys of it, as in
    training.global_batch=32; `auto3d keys` lists them all.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
    return 0


def _recipe_command(function: Callable) -> Callable:
    """A command with the arguments that all commands on a recipe share."""
    function = click.argument("overrides", nargs=-1)(function)
    function = click.argument("recipe")(function)
    return cli.command(name=function.__name__.rstrip("_"))(function)


@_recipe_command
@click.option("--json", "as_json", is_flag=True, help="Print one record, in seconds and bytes, with the best plans.")
@click.option("--all", "show_all", is_flag=True, help="A line for every candidate, not for the best twenty.")
def plan(recipe: str, overrides: tuple[str, ...], as_json: bool, show_all: bool) -> int:
    """Search RECIPE's space for the fastest plan by prediction, and say why it is best. Trains nothing.

    search.algorithm is annealing, random, megatron, exhaustive or rannc; search.candidates and search.seconds are its
    budget.
    """
    loaded = load(recipe, overrides)
    from launch.plan import print_plans
    from launch.progress import search_progress
    from launch.search import search_recipe

    with search_progress(err) as tell:
        search = search_recipe(loaded, tell)
    print_plans(loaded, search, as_json=as_json, show_all=show_all)
    return 0


_detach = click.option("--detach", is_flag=True, help="Return once it is under way, and say how to follow it.")


@_recipe_command
@_detach
def tune(recipe: str, overrides: tuple[str, ...], detach: bool) -> int:
    """Search as `plan` does, then try the best candidates, and write the fastest plan to results/.

    Each trial corrects what is predicted for those that are left. search.trials is how many run at most; finished ones
    never run twice.
    """
    loaded = load(recipe, overrides)
    return _start_driver(loaded, "tune") if detach else _tune(loaded)


def _tune(loaded: LoadedRecipe) -> int:
    from launch import tune as tuning
    from launch.progress import search_progress, sweep_progress
    from launch.search import search_recipe

    try:
        with search_progress(err) as tell:
            search = search_recipe(loaded, tell)
        with sweep_progress(err) as watcher:
            tried = tuning.run_tune(loaded, search, watcher)
    except KeyboardInterrupt:
        return _interrupted(loaded)
    files = tuning.write(loaded, tried)
    print(f"{tuning.table(tried, 'simple')}\n\n{tuning.told(tried)}\n\nwritten: {', '.join(map(str, files))}")
    if tuning.fastest(tried) is None:
        return complain("no trial is ok", RUN_FAILED)
    print(f"train under the fastest: {loaded.command('train', '--plan', str(files[-1]), without='plan')}")
    return 0


@_recipe_command
@click.option("--retry", is_flag=True, help="Run again the trials that failed or timed out.")
@click.option("--dry-run", is_flag=True, help="Print the sbatch text of its jobs, and submit none; needs no SLURM.")
@click.option("--test-only", is_flag=True, help="Ask SLURM whether it would take its jobs, and submit none.")
@_detach
def sweep(recipe: str, overrides: tuple[str, ...], dry_run: bool, test_only: bool, retry: bool, detach: bool) -> int:
    """Run every plan of RECIPE's search space as a trial, skip those that are done, and print the table."""
    loaded = load(recipe, overrides)
    from launch.executor import on_slurm
    from launch.sweep import Retry, print_submissions

    if dry_run or test_only:
        print_submissions(loaded, ask_slurm=test_only)
        return 0
    if detach and not on_slurm(loaded):
        return _start_driver(loaded, "sweep", *["--retry"] * retry)
    return _sweep(loaded, Retry.ALL if retry else Retry.NONE, follow=not detach)


def _sweep(loaded: LoadedRecipe, retry: "Retry", *, follow: bool = True) -> int:
    from launch import tables
    from launch.progress import sweep_progress
    from launch.sweep import run_sweep
    from launch.watcher import FINAL

    try:
        with sweep_progress(err) as watcher:
            run_sweep(loaded, retry=retry, watcher=watcher, follow=follow)
    except KeyboardInterrupt:
        return _interrupted(loaded)
    if not follow:
        print(_next_commands(loaded))
        return 0
    results = tables.results_of(loaded)
    files = tables.write(results)
    print(f"{tables.terminal(results)}\n\nwritten: {', '.join(map(str, files))}")
    failed = sum(measurement.status not in FINAL for measurement in results.measurements)
    if failed:
        err.print(f"{failed} failed or timed out; to run them again: {loaded.command('sweep', '--retry')}", **_PLAIN)
    if tables.best(results) is None:
        return complain("no trial is ok", RUN_FAILED)
    print(f"train under the fastest: {loaded.command('train', '--plan', str(files[-1]), without='plan')}")
    return 0


def _start_driver(loaded: LoadedRecipe, verb: str, *options: str) -> int:
    from launch.detach import start_driver
    from launch.sweep import check_place

    check_place(loaded)
    pid, log = start_driver(loaded, verb, options)
    print(f"process {pid} runs it, and prints to {log}\n{_next_commands(loaded)}")
    return 0


def _next_commands(loaded: LoadedRecipe) -> str:
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
    from launch.executor import on_slurm

    if on_slurm(loaded):
        err.print(f"interrupted; jobs of SLURM go on:\n{_next_commands(loaded)}", **_PLAIN)
        return INTERRUPTED
    return complain("interrupted; finished trials are kept, and the same command runs the rest", INTERRUPTED)


@_recipe_command
def resume(recipe: str, overrides: tuple[str, ...]) -> int:
    """Go on with the last sweep or tune of RECIPE: follow what runs, run what is left, retry what failed.

    A trial that failed or timed out is started launch.attempts times at most. OVERRIDES, if any, replace those of that
    command.
    """
    from launch.status import resumed

    loaded, verb = resumed(load(recipe, overrides))
    from launch.sweep import Retry

    return _tune(loaded) if verb == "tune" else _sweep(loaded, Retry.UP_TO_A_LIMIT)


@_recipe_command
@click.option("--watch", is_flag=True, help="Say what changes, until no trial is under way.")
def status(recipe: str, overrides: tuple[str, ...], watch: bool) -> int:
    """Say where the trials of RECIPE's last sweep or tune stand: done, running, waiting, lost."""
    loaded = load(recipe, overrides)
    from launch import status as standing

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
    from launch.status import print_logs

    print_logs(loaded, trial, follow=follow)
    return 0


@cli.command()
@click.argument("recipe")
@click.argument("trial", required=False)
def cancel(recipe: str, trial: str | None) -> int:
    """End the trials of RECIPE that are under way, or TRIAL alone; `resume` runs them again."""
    loaded = load(recipe)
    from launch.detach import end_driver
    from launch.status import cancel_trials

    if trial is None and (pid := end_driver(loaded)) is not None:
        print(f"asked process {pid}, which ran trials in the background, to end")
    cancelled = cancel_trials(loaded, trial)
    print(f"cancelled {len(cancelled)} jobs of SLURM{': ' * bool(cancelled)}{', '.join(cancelled)}")
    return 0


@_recipe_command
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
    from launch import tables

    results = tables.results_of(loaded)
    if as_json:
        print_json(tables.rows(results))
        return 0
    files = tables.write(results)
    print(f"{tables.terminal(results)}\n\nwritten: {', '.join(map(str, files))}")
    return 0


@_recipe_command
@click.option("--plan", "plan_file", type=click.Path(exists=True, dir_okay=False), help="Train under this plan.")
@click.option("--json", "as_json", is_flag=True, help="Print loss, grad_norm, iteration_s, peak_bytes and the plan.")
def train(recipe: str, overrides: tuple[str, ...], plan_file: str | None, as_json: bool) -> int:
    """Train RECIPE's model under --plan or the recipe's own plan, as in: auto3d train tiny plan.dp=2 plan.pp=2.

    It starts its own processes, or is one of those that torchrun, srun or mpirun started.
    """
    loaded = load(recipe, overrides)
    from launch.train import run_training

    return run_training(loaded, plan_file, err, lambda record: _print_training(record, as_json))


def _print_training(record: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(record)
        return
    plan = record["plan"]
    under = (
        f"{len(record['iteration_s'])} iterations under dp={plan['dp']} tp={plan['tp']} pp={plan['pp']} "
        f"micro-batch={plan['micro_batch_size']} {plan['schedule']}"
    )
    if record["emulated"]:
        print(f"{under}: {record['samples_per_s']:.1f} samples/s (emulated, not measured: nothing was computed)")
        return
    print(
        f"{under}: loss {record['loss'][0]:.3f} to {record['loss'][-1]:.3f}, {record['samples_per_s']:.1f} samples/s, "
        f"peak memory {max(record['peak_bytes']) / 2**20:.0f} MiB per rank (measured)"
    )


@_recipe_command
@click.option("--json", "as_json", is_flag=True, help="Print the share and what was tried, each with its status.")
def recompute(recipe: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Find by short real trials the largest share of RECIPE's plan that need not be recomputed for lack of memory."""
    loaded = load(recipe, overrides)
    from launch.recompute import Tried, try_shares

    tried: list[Tried] = []

    def report(one: Tried) -> None:
        tried.append(one)
        measurement = one.measurement
        told = f"fits, {measurement.median_s:.3f} s/iteration" if one.fits else f"{measurement.status}\n"
        err.print(f"recompute={one.share!r}: {told}{measurement.error}", **_PLAIN)

    share = try_shares(loaded, report)
    if as_json:
        records = [{"recompute": one.share, "status": one.measurement.status} for one in tried]
        print_json({"recompute": share, "tried": records})
    elif share is not None:
        print(f"the largest that fits: {loaded.command('train', f'plan.recompute={share!r}')}")
    return 0 if share is not None else complain("no share fits, or a trial failed", RUN_FAILED)


_COUNT = click.IntRange(min=1)
_EXISTING = click.Path(exists=True, dir_okay=False)


@_recipe_command
@click.option("--micro-batch-size", type=_COUNT, help="Samples. [that of the recipe's plan, else 1]")
@click.option("--subgraphs", type=_COUNT, help="Into how many to shard. [as many as there can be]")
@click.option("--fresh", is_flag=True, help="Capture it again, whatever the cache holds.")
@click.option("--json", "as_json", is_flag=True, help="Print one record, in seconds and bytes.")
def capture(recipe: str, overrides: tuple[str, ...], **options: Any) -> int:
    """Capture RECIPE's model without memory: its size, FLOPs, operations and subgraphs; what that took."""
    loaded = load(recipe, overrides)
    from launch.capture import print_capture

    print_capture(loaded, **options)
    return 0


@_recipe_command
@click.option("--method", default="autopipe", show_default=True, help="How to choose the stages.")
@click.option("--stages", type=_COUNT, help="How many; rannc finds that itself.")
@click.option("--subgraphs", type=_COUNT, help="Into how many to shard first. [as many as there can be]")
@click.option("--micro-batch-size", type=_COUNT, help="Samples. [that of the recipe's plan, else 1]")
@click.option("--memory-gib", type=click.FloatRange(min=0, min_open=True), help="Of a device. [enough]")
@click.option("--fresh", is_flag=True, help="Capture the model again, whatever the cache holds.")
@click.option("--json", "as_json", is_flag=True, help="Print one record, in seconds and bytes.")
@click.option("--svg", type=click.Path(dir_okay=False), help="Write a picture.")
@click.option("--plan", "plan_file", type=click.Path(dir_okay=False), help="Write the plan, for `auto3d train --plan`.")
def partition(recipe: str, overrides: tuple[str, ...], **options: Any) -> int:
    """Cut RECIPE's model into stages and tell what is in each, as in: auto3d partition tiny --stages 4."""
    loaded = load(recipe, overrides)
    from launch.partition import print_partition

    print_partition(loaded, **options)
    return 0


@_recipe_command
@click.option("--candidates", "file", required=True, type=_EXISTING, help="A CSV file with a row for each.")
@click.option("--out", "out_file", type=click.Path(dir_okay=False), help="Write its rows with what is predicted.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of records, in seconds and bytes.")
def predict(recipe: str, overrides: tuple[str, ...], **options: Any) -> int:
    """Predict seconds per iteration and peak bytes of each configuration in a CSV file; runs nothing.

    Its columns are micro_batch_size, tp, dp and pp and, where they are there, partition_cuts, schedule (as in
    interleaved-1f1b:chunks=2), recompute, and keys of the recipe, such as model.config.n_layer.
    """
    loaded = load(recipe, overrides)
    from launch.predict import print_predictions

    print_predictions(loaded, **options)
    return 0


@_recipe_command
@click.option("--measurements", "file", required=True, type=_EXISTING, help="A CSV file as of predict, with times.")
@click.option("--parameter", "parameters", multiple=True, help="To fit, such as launch_s; may be repeated. [compute]")
@click.option("--folds", type=click.IntRange(min=2), default=5, show_default=True, help="To cross-validate in.")
@click.option("--json", "as_json", is_flag=True, help="Print one record with every error.")
def calibrate(recipe: str, overrides: tuple[str, ...], **options: Any) -> int:
    """Fit the physical parameters of RECIPE's cluster to measured iterations, and say the error.

    The file has the columns of predict, and measured_s or measured_ms.
    """
    loaded = load(recipe, overrides)
    from launch.calibrate import print_calibration

    print_calibration(loaded, **options, progress=err)
    return 0


@_recipe_command
@click.option("--json", "as_json", is_flag=True, help="Print one record, in seconds and bytes.")
def profile(recipe: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Measure this machine for RECIPE, for the predictions of its cluster: writes profiles/<cluster>.json and .svg.

    It runs a process for each device of one node: each distinct subgraph of the model at several micro-batch sizes,
    alone and while all compute, messages, all-reduces, and the optimizer's update.
    """
    loaded = load(recipe, overrides)
    from launch.profile import print_profile

    print_profile(loaded, err, as_json=as_json)
    return 0


_TIME = click.FloatRange(min=0)
_FILE = click.Path(dir_okay=False)


@cli.command()
@click.argument("name", required=False)
@click.option("--list", "list_all", is_flag=True, help="Describe all schedules and their options.")
@click.option("--compare", metavar="A,B,...", help="A row for each; chimera:scale=doubling gives one its own option.")
@click.option("--stages", type=int, help="Pipeline depth: how many devices the model is laid over.")
@click.option("--micro-batches", type=int, help="Micro-batches per iteration.")
@click.option("--pipes", type=int, help="Replicas of the model that flow through the devices (chimera).")
@click.option("--scale", help="direct, doubling or halving: chimera with more micro-batches than stages.")
@click.option("--chunks", type=int, help="Stages per device (interleaved-1f1b).")
@click.option("--recompute", type=click.Choice(RECOMPUTE), help="All stages or none, where the choice is free.")
@click.option("--iterations", type=int, help="Iterations to run, of an asynchronous schedule.")
@click.option("--sync-placement", type=click.Choice(SYNC), help="At the end, at once, or at once where it hides.")
@click.option("--forward", type=_TIME, help="Time of one device's share of the model for one micro-batch. [1]")
@click.option("--backward", type=_TIME, help="The same of the backward. [the sum of its halves, or twice --forward]")
@click.option("--backward-input", type=_TIME, help="Its half for the gradient of the input. [the rest]")
@click.option("--backward-weight", type=_TIME, help="Its half for the gradient of the weights. [the rest]")
@click.option("--recompute-time", type=_TIME, help="Of running the forward again. [--forward]")
@click.option("--p2p", type=_TIME, help="Of a message of one micro-batch from stage to stage. [0]")
@click.option("--overlap/--no-overlap", default=None, help="Whether messages travel beside compute. [they do]")
@click.option("--sync", type=_TIME, help="Of the gradient sync of one device's share. [0]")
@click.option("--json", "as_json", is_flag=True, help="Print the figures and all operations.")
@click.option("--svg", type=_FILE, help="Write a picture.")
@click.option("--trace", type=_FILE, help="Write a trace for ui.perfetto.dev or chrome://tracing.")
@click.option("--csv", type=_FILE, help="Write the order in the form that torch.distributed.pipelining loads.")
def schedule(
    name: str | None,
    list_all: bool,
    compare: str | None,
    stages: int | None,
    micro_batches: int | None,
    as_json: bool,
    svg: str | None,
    trace: str | None,
    csv: str | None,
    **given: Any,
) -> int:
    """Simulate and draw pipeline schedule NAME, as in: auto3d schedule chimera --stages 4 --micro-batches 8."""
    from launch.schedule import Request, print_comparison, print_families, print_schedule

    if list_all:
        print_families(as_json)
        return 0
    if (name is None) == (compare is None):
        raise click.UsageError("write one schedule's name, or --compare A,B,..., or --list")
    if stages is None or micro_batches is None:
        raise click.UsageError("--stages and --micro-batches are needed, as in --stages 4 --micro-batches 8")
    families = {"pipes": "pipes", "scale": "scale", "chunks": "chunks", "recompute": "recompute"}
    families |= {"iterations": "iterations", "sync_placement": "sync"}
    times = {"recompute_time": "recompute"} | {
        key: key for key in ("forward", "backward", "backward_input", "backward_weight", "p2p", "overlap", "sync")
    }
    request = Request(
        stages=stages,
        micro_batches=micro_batches,
        options={option: given[key] for key, option in families.items() if given[key] is not None},
        times={time: given[key] for key, time in times.items() if given[key] is not None},
    )
    files = {"svg": svg, "trace": trace, "csv": csv}
    if name is not None:
        print_schedule(name, request, out, as_json=as_json, files=files)
        return 0
    if any(files.values()):
        raise click.UsageError("--svg, --trace and --csv write one schedule; --compare has several")
    print_comparison(compare.split(","), request, as_json=as_json)
    return 0


@cli.command()
def keys() -> int:
    """List every key of a recipe: its default, what it takes, and what it means."""
    if not out.is_terminal:
        for name, default, takes, meaning in documented_keys():
            print(name, json.dumps(default), takes, meaning, sep="\t")
        return 0
    table = Table()
    table.add_column("key", no_wrap=True)
    for heading in ("default", "takes", "meaning"):
        table.add_column(heading, overflow="fold")
    for name, default, takes, meaning in documented_keys():
        table.add_row(name, escape(json.dumps(default)), takes, escape(meaning))
    out.print(table)
    return 0
