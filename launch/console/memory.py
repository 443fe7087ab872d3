"""`auto3d predict --memory`: the predicted memory of one plan, as text, JSON or a drawing."""

from dataclasses import asdict

from tabulate import tabulate

from auto3d.cost.memory.device import ENTRIES, in_gib
from auto3d.simulate.draw_memory_svg import draw_memory_svg
from launch.console.output import print_json, write_text
from launch.model.memory import PredictedMemory, predicted_memory
from launch.recipe.load import LoadedRecipe


def print_memory(recipe: LoadedRecipe, *, plan_file: str | None, svg: str | None, as_json: bool) -> None:
    """Print the peak of each pipeline device with its witness and largest tensors; ``svg`` names a file to draw."""
    predicted = predicted_memory(recipe, plan_file)
    if svg:
        timeline = predicted.model.timeline(predicted.plan)
        curves = predicted.model.memory.over_time(predicted.plan, timeline, range(len(predicted.devices)))
        caption = f"{predicted.plan.schedule}: predicted memory of each pipeline device over one iteration"
        write_text(svg, draw_memory_svg(curves, predicted.capacity, caption=caption))
    if as_json:
        print_json(_records(predicted))
        return
    for number, (device, has) in enumerate(zip(predicted.devices, predicted.capacity, strict=True)):
        room = "" if has is None else f" of {in_gib(has)} GiB"
        where = f" ({device.operation})" if device.operation else ""
        print(f"pipeline device {number}: {in_gib(device.total)} GiB{room}, at {device.at}{where}")
        entries = sorted(((getattr(device, name), name) for name in ENTRIES), reverse=True)
        print("  " + ", ".join(f"{name} {in_gib(size)}" for size, name in entries if size))
        cells = [
            (f"{in_gib(tensor.total)}", f"{tensor.count:g} x {in_gib(tensor.bytes)}", tensor.kind, tensor.name)
            for tensor in predicted.largest[number]
        ]
        print(tabulate(cells, ["GiB", "count x GiB", "held as", "tensor"], disable_numparse=True), end="\n\n")
    if svg:
        print(f"written: {svg}")


def _records(predicted: PredictedMemory) -> list[dict[str, object]]:
    return [
        {
            "device": number,
            "peak_bytes": device.total,
            **asdict(device),
            "capacity_bytes": has,
            "largest": [asdict(tensor) for tensor in largest],
        }
        for number, (device, has, largest) in enumerate(
            zip(predicted.devices, predicted.capacity, predicted.largest, strict=True)
        )
    ]
