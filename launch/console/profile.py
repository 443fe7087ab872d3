"""`auto3d profile`: writes the profile of this machine, and shows it as a table and a plot."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from tabulate import tabulate

from auto3d.cluster import CollectiveTimes
from auto3d.cost.profile import Profile
from auto3d.words import counted
from launch.console.output import print_json
from launch.console.progress import at_work, profile_progress
from launch.model.profile import profile_file, tuned_file
from launch.recipe.load import LoadedRecipe
from launch.store.files import private_folder, write_whole


def print_profile(recipe: LoadedRecipe, console: Console, *, stages: bool, as_json: bool) -> None:
    """Measure this machine, write profiles/<cluster>.json and .svg, and print the figures.

    With ``stages``, RaNNC's candidate stages are measured too.
    """
    profile = measure_with_progress(recipe, console)
    if stages:
        profile = _with_stages(recipe, profile, console)
    file, picture = write_profile(profile, profile_file(recipe))
    for older in (tuned_file(recipe), tuned_file(recipe).with_suffix(".svg")):
        older.unlink(missing_ok=True)
    if as_json:
        print_json({"file": str(file), **asdict(profile)})
    else:
        print(f"{_table(profile)}\n\nwritten: {file}, {picture}")


def measure_with_progress(recipe: LoadedRecipe, console: Console) -> Profile:
    """The profile of this machine; the progress of the measurement is shown on ``console``."""
    from launch.model.measure_profile import measure_profile  # it imports torch, which tune does without

    return measure_profile(
        recipe,
        capturing=lambda size: at_work(console, f"capturing the model for micro-batches of {counted(size, 'sample')}"),
        measuring=partial(profile_progress, console),
    )


def _with_stages(recipe: LoadedRecipe, profile: Profile, console: Console) -> Profile:
    from launch.model.measure_stages import measure_candidates  # it imports torch, which tune does without

    return replace(
        profile,
        candidates=measure_candidates(
            recipe,
            profile,
            capturing=lambda size: at_work(console, f"cutting stages of micro-batches of {counted(size, 'sample')}"),
            measuring=partial(profile_progress, console),
        ),
    )


def write_profile(profile: Profile, file: Path) -> tuple[Path, Path]:
    """Write ``profile`` to ``file``, and its picture beside it; returns both files."""
    private_folder(file.parent)
    write_whole(file, profile.to_json())
    picture = file.with_suffix(".svg")
    _draw(profile, picture)
    return file, picture


def _table(profile: Profile) -> str:
    """Times of the subgraphs, then figures of the machine, with how they were measured."""
    rows = [
        (
            size.micro_batch_size,
            f"{size.tp}, sequence" if size.sequence_parallel else str(size.tp),
            subgraph.name,
            size.kinds.count(kind),
            f"{1e3 * subgraph.forward_s:.3f}",
            f"{1e3 * subgraph.backward_s:.3f}",
            f"{1e3 * subgraph.backward_weight_s:.3f}",
            f"{subgraph.saved_bytes / 2**20:.2f}",
        )
        for size in profile.sizes
        for kind, subgraph in enumerate(size.subgraphs)
    ]
    heads = ["micro-\nbatch", "tp", "subgraph", "times in\nthe model", "forward\n(ms)", "backward\n(ms)"]
    subgraphs = tabulate(rows, [*heads, "weight half\n(ms)", "saved\n(MiB)"], disable_numparse=True)
    factors = ", ".join(f"{factor:.2f}" for factor in profile.slowdown)
    figures = [("slowdown", factors, "while 1, 2, … ranks compute at the same time")]
    if profile.messages:
        link, (each_s, per_byte_s) = profile.messages.link, profile.messages.handling
        fitted = "least-squares line over message sizes"
        figures.append(("messages", _rate(link.bandwidth), f"plus {1e6 * link.latency_s:.0f} µs each; {fitted}"))
        handling = f"plus {1e6 * each_s:.0f} µs of compute in sender and receiver for each message; {fitted}"
        figures.append(("message handling", _rate(1 / per_byte_s), handling))
    for name, times, passes in _collectives(profile):
        for ranks, seconds in zip(times.ranks, times.seconds, strict=True):
            size, longest = times.sizes[-1], seconds[-1]
            rate = _rate(_bus_bandwidth(ranks, size, longest, passes))
            figures.append((f"{name} of {ranks}", rate, f"bus bandwidth at {size / 2**20:.0f} MiB"))
    if profile.sums:
        start_s, slowdown = profile.sums.start_and_slowdown
        how = f"longer takes compute beside a gradient sum, plus {1e6 * start_s:.0f} µs for its start"
        figures.append(("sum beside compute", f"{slowdown:.1%}", f"{how}; least squares over sizes"))
    figures.append(("update", f"{1e9 * profile.update_s:.2f} ns", "per parameter, with gradient norm and zeroing"))
    if profile.candidates:
        stages, distinct = len(profile.candidates[0].kinds), sum(len(size.forward_s) for size in profile.candidates)
        sizes = ", ".join(str(size.micro_batch_size) for size in profile.candidates)
        figures.append(
            ("candidate stages", str(stages), f"of RaNNC, at micro-batch sizes {sizes}; {distinct} distinct")
        )
    repetitions = [subgraph.repetitions for size in profile.sizes for subgraph in size.subgraphs]
    ranks, threads = profile.setting.devices_per_node, profile.setting.threads
    how = (
        f"Measured: {profile.model}, {counted(ranks, 'rank')} of {counted(threads, 'thread')} on "
        f"{profile.host}, torch {profile.torch}, {profile.made[:10]}; each subgraph by itself, {min(repetitions)} to "
        f"{max(repetitions)} repetitions per round, median of the fastest round."
    )
    return f"{subgraphs}\n\n{tabulate(figures, tablefmt='plain', disable_numparse=True)}\n\n{how}"


def _rate(bandwidth: float) -> str:
    return f"{8 * bandwidth / 1e9:.2f} Gbit/s"


def _collectives(profile: Profile) -> list[tuple[str, CollectiveTimes, int]]:
    """Name and times of each measured collective, and how many times its ring passes each byte on."""
    measured = profile.collectives
    if measured is None:
        return []
    return [
        ("all-reduce", measured.all_reduce, 2),
        ("all-gather", measured.all_gather, 1),
        ("reduce-scatter", measured.reduce_scatter, 1),
    ]


def _bus_bandwidth(ranks: int, size: int, seconds: float, passes: int) -> float:
    """Bytes per second through each rank's link in a ring."""
    return passes * (ranks - 1) / ranks * size / seconds


def _draw(profile: Profile, file: Path) -> None:
    """Plot the time of each distinct subgraph over micro-batch sizes, and bandwidths over message sizes."""
    from matplotlib.figure import Figure  # it is slow to import, and tune imports this file

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, rates = figure.subplots(1, 2)
    whole = [size for size in profile.sizes if size.tp == 1]
    sizes = [size.micro_batch_size for size in whole]
    for name in dict.fromkeys(subgraph.name for size in whole for subgraph in size.subgraphs):
        subgraphs = [next((subgraph for subgraph in size.subgraphs if subgraph.name == name), None) for size in whole]
        milliseconds = [
            1e3 * (subgraph.forward_s + subgraph.backward_s) if subgraph else None for subgraph in subgraphs
        ]
        times.plot(sizes, milliseconds, marker="o", label=name)
    times.set(xlabel="micro-batch size (samples)", ylabel="forward and backward (ms)", xlim=0, ylim=0)
    times.legend(fontsize="small")
    lines = {}
    if profile.messages:
        lines["message"] = (
            profile.messages.sizes,
            [size / seconds for size, seconds in zip(profile.messages.sizes, profile.messages.seconds, strict=True)],
        )
    for name, measured, passes in _collectives(profile):
        for ranks, row in zip(measured.ranks, measured.seconds, strict=True):
            each_rate = zip(measured.sizes, row, strict=True)
            lines[f"{name} of {ranks}, bus"] = (
                measured.sizes,
                [_bus_bandwidth(ranks, size, seconds, passes) for size, seconds in each_rate],
            )
    for label, (line_sizes, bandwidths) in lines.items():
        rates.loglog(line_sizes, [8 * bandwidth / 1e9 for bandwidth in bandwidths], marker="o", label=label)
    rates.set(xlabel="size (bytes)", ylabel="bandwidth (Gbit/s)")
    if lines:
        rates.legend(fontsize="small")
    figure.suptitle(f"Measured: {profile.model}, {profile.host}, {profile.made[:10]}", fontsize="medium")
    figure.savefig(file)
