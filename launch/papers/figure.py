"""The plot of a part, as SVG."""

from collections.abc import Sequence
from io import StringIO

from launch.papers.item import QUANTITIES, Figure, Part
from launch.papers.row import Row

PANEL = (4.2, 3.2)  # inches
MOST_COLUMNS = 2


def draw(part: Part, figure: Figure, rows: Sequence[Row]) -> str:
    """The plot as SVG text; equal rows give equal text.

    Settings of several axes get one panel per label of the first axis; the other labels stand on the x axis.
    """
    import matplotlib as mpl  # it takes a second to import

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    quantity = figure.quantity or part.quantity
    settings = list(dict.fromkeys(row.setting for row in rows))
    systems = list(dict.fromkeys(row.system for row in rows))
    panels = list(dict.fromkeys(setting[:1] if len(setting) > 1 else () for setting in settings))
    columns = min(MOST_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    values = {(row.setting, row.system): row.values.get(quantity) for row in rows}
    with mpl.rc_context({"svg.hashsalt": "auto3d", "svg.fonttype": "none", "font.size": 8}):
        drawing, axes = plt.subplots(
            lines, columns, figsize=(PANEL[0] * columns, PANEL[1] * lines), squeeze=False, layout="constrained"
        )
        for place in axes.flat[len(panels) :]:
            place.set_visible(False)
        for panel, place in zip(panels, axes.flat, strict=False):
            inside = [setting for setting in settings if setting[: len(panel)] == panel]
            ticks = range(len(inside))
            for number, system in enumerate(systems):
                heights = [values.get((setting, system)) for setting in inside]
                present = [(tick, height) for tick, height in zip(ticks, heights, strict=True) if height is not None]
                if figure.form == "lines":
                    place.plot(*zip(*present, strict=True) if present else ([], []), marker="o", label=system)
                    continue
                width = 0.8 / len(systems)
                shift = (number - (len(systems) - 1) / 2) * width
                place.bar([tick + shift for tick, _ in present], [height for _, height in present], width, label=system)
            tilted = 45 if any(len(", ".join(setting[len(panel) :])) > 6 for setting in inside) else 0
            place.set_xticks(list(ticks), [", ".join(setting[len(panel) :]) for setting in inside], rotation=tilted)
            place.set_ylabel(QUANTITIES.get(quantity, quantity))
            place.set_title(", ".join(panel) or part.title)
            if figure.logarithmic:
                place.set_yscale("log")
            place.spines[["top", "right"]].set_visible(False)
        axes.flat[0].legend(frameon=False)
        text = StringIO()
        drawing.savefig(text, format="svg", metadata={"Date": None})
        plt.close(drawing)
    return text.getvalue()
