"""`auto3d profile`: measure this machine for a recipe, write the profile, and show it as a table and a plot."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from tabulate import tabulate

from auto3d.cost.profile import Profile, ProfileError, Setting
from launch.console.output import print_json
from launch.recipe.load import LoadedRecipe
from launch.recipe.schema import AUTO
from launch.recipe.settings import cluster
from launch.store.files import private_folder, write_whole

PROFILES = Path("profiles")


def profile_file(recipe: LoadedRecipe) -> Path:
    """The profile of the recipe's cluster, which `auto3d profile` measures."""
    return PROFILES / f"{recipe.cluster_name}.json"


def tuned_file(recipe: LoadedRecipe) -> Path:
    """The profile that `auto3d tune` measures: of this recipe alone, so that no other meets one of a foreign model."""
    return PROFILES / f"{recipe.cluster_name}-{recipe.name}.json"


def setting_of(recipe: LoadedRecipe) -> Setting:
    values = recipe.values
    return Setting(
        device=values.cluster.device,
        accelerator=cluster(recipe).nodes[0].accelerator.name,
        devices_per_node=values.cluster.devices_per_node,
        threads=values.training.threads_per_rank,
        tf32=values.training.tf32,
        deterministic=values.training.deterministic,
    )


def basis(recipe: LoadedRecipe, measured_in: str) -> str:
    """What its predicted times are made of, for a person; ``measured_in`` is the file of a profile, if there is one."""
    if recipe.values.model.layers is not None:
        return f"the layers of {recipe.values.model.layers}"
    if measured_in:
        return f"what {measured_in} measured"
    kinds = [kind.accelerator for kind in (recipe.values.cluster, *recipe.values.cluster.more)]
    named = [f"recipes/accelerators/{kind}.yaml" if "/" not in kind else kind for kind in dict.fromkeys(kinds) if kind]
    guesses = ["round figures of a data-centre GPU"] if None in kinds else []
    return " and ".join([*named, *guesses])


def how_to_measure(recipe: LoadedRecipe, measured_in: str) -> str:
    """The command that measures what times are predicted from; nothing where that is done, or cannot be."""
    values = recipe.values
    if measured_in or values.model.layers is not None or values.training.compute != "real":
        return ""
    if values.prediction.profile == "none":
        return ""
    if values.cluster.more or values.cluster.nodes > 1:
        return recipe.command("profile", "cluster.nodes=1", *["cluster.more=[]"] * bool(values.cluster.more))
    return recipe.command("profile")


def find_profile(recipe: LoadedRecipe, fingerprint: Callable[[int], str]) -> tuple[Path, Profile] | None:
    """The profile that ``prediction.profile`` chooses, and its file; None if there is none.

    ``auto`` takes what `tune` measured for this recipe where it fits, else the profile of the cluster. Raises
    RecipeError, with the command that makes the right one, where a profile is of another model, device or setting, or
    is not there. ``fingerprint`` gives that of the model's Graph at a micro-batch size.
    """
    wanted = recipe.values.prediction.profile
    if wanted == "none" or recipe.values.model.layers is not None:
        return None
    if wanted == AUTO:
        with suppress(OSError, ProfileError):
            return tuned_file(recipe), _fitting(recipe, tuned_file(recipe), fingerprint)
        if not profile_file(recipe).is_file():
            return None
    elif not Path(wanted).is_file():
        raise recipe.error("prediction.profile", f"found {wanted!r}; there is no such file")
    file = profile_file(recipe) if wanted == AUTO else Path(wanted)
    try:
        return file, _fitting(recipe, file, fingerprint)
    except ProfileError as error:
        again = f"to measure: {recipe.command('profile')}; to predict without: prediction.profile=none"
        raise recipe.error("prediction.profile", f"{file}: {error}; {again}") from None


def _fitting(recipe: LoadedRecipe, file: Path, fingerprint: Callable[[int], str]) -> Profile:
    """The profile in ``file``; raises ProfileError where it is not of the recipe's model and setting."""
    profile = Profile.from_json(file.read_bytes())
    profile.check(setting_of(recipe), fingerprint)
    return profile


def micro_batch_sizes(recipe: LoadedRecipe) -> list[int]:
    """Those of the recipe's search and plan, and the powers of two up to the largest."""
    values = recipe.values
    batch, searched = values.training.global_batch, values.search.micro_batch_size
    sizes = set() if searched == AUTO else {size for size in searched if size <= batch}
    if values.plan is not None:
        sizes.add(values.plan.micro_batch_size)
    largest = max(sizes, default=1) if searched != AUTO else batch
    return sorted(sizes | {2**power for power in range(largest.bit_length()) if 2**power <= largest})


def print_profile(recipe: LoadedRecipe, console: Console, *, as_json: bool) -> None:
    """Measure, write profiles/<cluster>.json and .svg, and print what was measured."""
    profile = measure_profile(recipe, console)
    file, picture = write_profile(profile, profile_file(recipe))
    for older in (tuned_file(recipe), tuned_file(recipe).with_suffix(".svg")):
        older.unlink(missing_ok=True)
    if as_json:
        print_json({"file": str(file), **asdict(profile)})
    else:
        print(f"{table(profile)}\n\nwritten: {file}, {picture}")


def write_profile(profile: Profile, file: Path) -> tuple[Path, Path]:
    """Write ``profile`` to ``file``, and its picture beside it; returns both."""
    private_folder(file.parent)
    write_whole(file, profile.to_json())
    picture = file.with_suffix(".svg")
    draw(profile, picture)
    return file, picture


def measure_profile(recipe: LoadedRecipe, console: Console) -> Profile:
    """On this machine, with a process for each device of a node."""
    from auto3d.runtime.distinct_subgraphs import ModelSubgraphs, distinct_subgraphs
    from auto3d.runtime.measurement import Environment, Status
    from auto3d.runtime.profiler import MachineTimes, measure, num_reports
    from auto3d.runtime.world import World
    from launch.console.progress import at_work, profile_progress
    from launch.model.build import captured_model, use_device
    from launch.model.graphs import PlanningModel
    from launch.recipe.data import data_settings
    from launch.recipe.settings import training_settings
    from launch.run.devices import devices_for
    from launch.run.ranks import Report, check_devices, run_ranks

    values = recipe.values
    _check(recipe)
    ranks = values.cluster.devices_per_node
    check_devices(recipe, ranks)
    devices = devices_for(recipe, ranks, size=ranks)
    settings, data = training_settings(values, iterations=1), data_settings(values)
    planning, cores = PlanningModel(recipe), len(os.sched_getaffinity(0))

    def model_of(size: int) -> ModelSubgraphs:
        captured = captured_model(recipe, size)
        return distinct_subgraphs(captured, planning.sharding(captured.graph).bounds)

    models: list[ModelSubgraphs] = []
    for size in [] if devices else micro_batch_sizes(recipe):  # ranks on GPUs capture: see launch.model
        with at_work(console, f"capturing the model for micro-batches of {size}"):
            models.append(model_of(size))

    def run(world: World, report: Report) -> tuple[MachineTimes, Environment]:
        if devices:
            use_device(world.device("cuda"))
        ours = models or [model_of(size) for size in micro_batch_sizes(recipe)]
        measured = measure(ours, settings, data, world, seed=values.training.seed, report=report)
        return measured, Environment.here(settings.device, cores=cores)

    limits = {"timeout_s": None, "straggle_s": settings.timeout_s}
    with profile_progress(console, num_reports(models) if models else None) as on_report:
        outcome = run_ranks(ranks, run, on_report=on_report, devices=devices, **limits)
    if outcome.status is not Status.OK:
        raise ProfileError(f"profile: the ranks ended as {outcome.status}:\n{outcome.error}")
    measured, environment = outcome.result
    return Profile(
        setting=setting_of(recipe),
        host=f"{environment.host}: {environment.computer}, load {os.getloadavg()[0]:.1f}",
        torch=environment.torch,
        model=f"{values.model.architecture or values.model.factory} of {recipe.name}",
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        sizes=measured.sizes,
        slowdown=measured.slowdown,
        messages=measured.messages,
        all_reduce=measured.all_reduce,
        update_s=measured.update_s,
    )


def _check(recipe: LoadedRecipe) -> None:
    values = recipe.values
    if values.model.layers is not None:
        raise recipe.error("model.layers", "found measured layers; a profile measures a model that can run")
    if values.training.compute != "real":
        raise recipe.error("training.compute", f"found {values.training.compute!r}; only real devices are measured")
    if values.cluster.more:
        raise recipe.error("cluster.more", "found further kinds of nodes; a profile is of one kind: leave them out")


def table(profile: Profile) -> str:
    """Seconds of subgraphs, and figures of the machine, each with how it was made."""
    rows = [
        (
            size.micro_batch_size,
            one.name,
            size.kinds.count(kind),
            f"{1e3 * one.forward_s:.3f}",
            f"{1e3 * one.backward_s:.3f}",
            f"{1e3 * one.backward_weight_s:.3f}",
            f"{one.saved_bytes / 2**20:.2f}",
        )
        for size in profile.sizes
        for kind, one in enumerate(size.subgraphs)
    ]
    heads = ["micro-\nbatch", "subgraph", "times in\nthe model", "forward\n(ms)", "backward\n(ms)"]
    subgraphs = tabulate(rows, [*heads, "weight half\n(ms)", "saved\n(MiB)"], disable_numparse=True)
    figures = [("slowdown", ", ".join(f"{factor:.2f}" for factor in profile.slowdown), "while 1, 2, … ranks compute")]
    if profile.messages:
        link, (each, per_byte) = profile.messages.link, profile.messages.handling
        line = "by the line of least error"
        figures.append(("messages", _rate(link.bandwidth), f"and {1e6 * link.latency_s:.0f} µs: {line}"))
        told = f"and {1e6 * each:.0f} µs that either process computes for one: {line}"
        figures.append(("their handling", _rate(1 / per_byte), told))
    if profile.all_reduce:
        for ranks, seconds in zip(profile.all_reduce.ranks, profile.all_reduce.seconds, strict=True):
            size, longest = profile.all_reduce.sizes[-1], seconds[-1]
            rate = _rate(_bus_bandwidth(ranks, size, longest))
            figures.append((f"all-reduce of {ranks}", rate, f"bus bandwidth at {size / 2**20:.0f} MiB"))
    figures.append(("update", f"{1e9 * profile.update_s:.2f} ns", "of one parameter, with norm and zeroing"))
    repetitions = [one.repetitions for size in profile.sizes for one in size.subgraphs]
    how = (
        f"Measured: {profile.model}, {profile.setting.devices_per_node} ranks of {profile.setting.threads} threads on "
        f"{profile.host}, torch {profile.torch}, {profile.made[:10]}; subgraphs alone, {min(repetitions)} to "
        f"{max(repetitions)} repetitions in rounds, medians of the fastest round."
    )
    return f"{subgraphs}\n\n{tabulate(figures, tablefmt='plain', disable_numparse=True)}\n\n{how}"


def _rate(bandwidth: float) -> str:
    return f"{8 * bandwidth / 1e9:.2f} Gbit/s"


def _bus_bandwidth(ranks: int, size: int, seconds: float) -> float:
    """Bytes per second through each rank's link in a ring."""
    return 2 * (ranks - 1) / ranks * size / seconds


def draw(profile: Profile, file: Path) -> None:
    """Seconds of each distinct subgraph by micro-batch size, and bandwidths by size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, rates = figure.subplots(1, 2)
    sizes = [size.micro_batch_size for size in profile.sizes]
    for name in dict.fromkeys(one.name for size in profile.sizes for one in size.subgraphs):
        each = [next((one for one in size.subgraphs if one.name == name), None) for size in profile.sizes]
        milliseconds = [1e3 * (one.forward_s + one.backward_s) if one else None for one in each]
        times.plot(sizes, milliseconds, marker="o", label=name)
    times.set(xlabel="micro-batch size (samples)", ylabel="forward and backward (ms)", xlim=0, ylim=0)
    times.legend(fontsize="small")
    lines = {}
    if profile.messages:
        lines["message"] = (
            profile.messages.sizes,
            [size / seconds for size, seconds in zip(profile.messages.sizes, profile.messages.seconds, strict=True)],
        )
    if profile.all_reduce:
        for ranks, row in zip(profile.all_reduce.ranks, profile.all_reduce.seconds, strict=True):
            lines[f"all-reduce of {ranks}, bus"] = (
                profile.all_reduce.sizes,
                [
                    _bus_bandwidth(ranks, size, seconds)
                    for size, seconds in zip(profile.all_reduce.sizes, row, strict=True)
                ],
            )
    for label, (line_sizes, bandwidths) in lines.items():
        rates.loglog(line_sizes, [8 * bandwidth / 1e9 for bandwidth in bandwidths], marker="o", label=label)
    rates.set(xlabel="size (bytes)", ylabel="bandwidth (Gbit/s)")
    if lines:
        rates.legend(fontsize="small")
    figure.suptitle(f"Measured: {profile.model}, {profile.host}, {profile.made[:10]}", fontsize="medium")
    figure.savefig(file)
