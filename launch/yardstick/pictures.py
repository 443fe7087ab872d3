"""The picture of a set: predicted against measured, times and peaks of memory."""

from pathlib import Path

from launch.yardstick.measured import GIB
from launch.yardstick.results import ScoredSet

PANEL = (4.5, 4.2)  # inches
OTHER = "textbook"  # the predictor that is drawn behind the first


def draw_pictures(scored: ScoredSet, file: Path) -> None:
    """Write a PNG with a panel of times and, where memory was measured, a panel of peaks.

    It shows the first predictor, its fitted parts in another colour, and behind it the textbook's.
    """
    import matplotlib as mpl  # it takes a second to import

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    first, *others = scored.predicted
    fitted = {part.part for part in scored.parts if part.fitted}
    times: dict[str, list[tuple[float, float]]] = {}
    peaks: dict[str, list[tuple[float, float]]] = {}
    for predictor in [*(other for other in others if other.name == OTHER), first]:
        for run, said in zip(scored.runs, scored.predicted[predictor], strict=True):
            label = predictor.name + (", fitted" if predictor is first and not fitted.isdisjoint(run.parts) else "")
            if run.timed and run.seconds is not None and said.seconds is not None:
                times.setdefault(label, []).append((run.seconds, said.seconds))
            for device, measured in run.memory:
                if (peak := said.peak(device)) is not None:
                    peaks.setdefault(label, []).append((measured / GIB, peak / GIB))
    panels = [(times, "s per iteration"), *([(peaks, "GiB of memory")] if peaks else [])]
    size = (PANEL[0] * len(panels), PANEL[1])
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    colours = {first.name: "tab:blue", f"{first.name}, fitted": "tab:orange"}
    for (points, unit), place in zip(panels, axes.flat, strict=True):
        every = [value for curve in points.values() for pair in curve for value in pair]
        if every:
            place.plot([min(every), max(every)], [min(every), max(every)], color="0.6", linewidth=1)
        for label, pairs in points.items():
            place.plot(*zip(*pairs, strict=True), ".", markersize=4, color=colours.get(label, "0.75"), label=label)
        place.set(xscale="log", yscale="log", xlabel=f"measured, {unit}", ylabel=f"predicted, {unit}")
    axes.flat[0].legend(frameon=False)
    figure.suptitle(scored.measured.title)
    figure.savefig(file, dpi=110, metadata={"Software": None})
    plt.close(figure)
