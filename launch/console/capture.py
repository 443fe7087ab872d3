"""`auto3d capture`: prints the figures of a recipe's model."""

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from auto3d.tensor_placement import Split
from launch.console.output import print_json
from launch.model.capture_figures import CaptureFigures, capture_figures
from launch.model.config_keys import unquantized
from launch.recipe.load import LoadedRecipe

if TYPE_CHECKING:
    from auto3d.derived.explain import Explanation


def print_capture(recipe: LoadedRecipe, *, as_json: bool, **options: Any) -> None:
    """Capture the recipe's model and print its figures; ``options`` go to ``capture_figures``."""
    figures = capture_figures(recipe, **options)
    if as_json:
        record = asdict(figures)
        absent = [name for name in ("check", "tensor") if record[name] is None]
        if figures.tensor is not None:
            for exchange in record["tensor"]["exchanges"]:
                exchange["collective"] = exchange["collective"].value
        print_json({name: value for name, value in record.items() if name not in absent})
    else:
        print(_table(figures))
        if (note := unquantized(recipe.values.model.config)) is not None:
            print(note)
        if figures.tensor is not None:
            print(f"\n{_tensor_table(figures.tensor, figures.micro_batch_size)}")


def _table(figures: CaptureFigures) -> str:
    common = ", ".join(f"{name} ({users})" for name, users in figures.common.items())
    inputs = ", ".join(f"{name} ({subgraph})" for name, subgraph in figures.first_user.items())
    source = "from the cache" if figures.cached else "captured"
    rows = [
        ("parameters", f"{figures.parameters:,}"),
        ("", f"{figures.parameter_bytes / 2**30:.3g} GiB"),
        ("forward", f"{figures.flops / 1e12:.4g} TFLOP per micro-batch of {figures.micro_batch_size}"),
        ("backward", f"{figures.backward_flops / 1e12:.4g} TFLOP"),
        ("operations", f"{figures.operations:,}"),
        ("subgraphs", f"{figures.subgraphs:,}"),
        ("common nodes (users)", common or "none"),
        ("inputs (first subgraph)", inputs),
        ("time taken", f"{figures.seconds:.2f} s, {source}"),
        ("peak memory taken", f"{figures.peak_bytes / 2**20:,.0f} MiB"),
    ]
    if figures.check is not None:
        rows.append(("check", figures.check))
    return tabulate(rows, tablefmt="plain", disable_numparse=True)


def _tensor_table(tensor: "Explanation", micro_batch_size: int) -> str:
    """The weights, alike weights in one row, and the shares and collectives of one rank."""
    rows: dict[tuple, int] = {}
    for weight in tensor.weights:
        name = re.sub(r"\d+", "*", weight.weight)
        row = name, " × ".join(map(str, weight.shape)), _split_in_words(weight.split, tensor.shards), weight.reason
        rows[row] = rows.get(row, 0) + 1
    cells = [(f"{name} ({count})" if count > 1 else name, *rest) for (name, *rest), count in rows.items()]
    weights = tabulate(cells, ["weight", "shape", f"on {tensor.shards} ranks", "because"], disable_numparse=True)
    exchanges = [
        (f"{exchange.phase}: {exchange.collective}", f"{exchange.count} of {exchange.bytes / 2**20:.4g} MiB in all")
        for exchange in tensor.exchanges
    ]
    shares = [
        ("FLOPs that are split", f"{tensor.split_flops:.1%}"),
        ("bytes of parameters that are split", f"{tensor.split_bytes:.1%}"),
        *exchanges,
    ]
    heading = f"per micro-batch of {micro_batch_size}"
    return f"{weights}\n\n{tabulate(shares, ['', heading], disable_numparse=True)}"


def _split_in_words(split: Split | None, shards: int) -> str:
    if split is None:
        return "whole"
    blocks = f" in {len(split.blocks)} blocks" if len(split.blocks) > 1 else ""
    padding = split.padding(shards)
    return f"dimension {split.dim} split{blocks}{f', padded by {padding}' if padding else ''}"
