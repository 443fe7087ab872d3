"""`auto3d capture`: the figures of a recipe's model."""

import resource
from math import prod
from time import perf_counter
from typing import Any

from tabulate import tabulate

from launch.console.output import print_json
from launch.model.check_capture import check_at
from launch.model.graphs import PlanningModel, default_micro_batch_size
from launch.recipe.load import LoadedRecipe


def print_capture(
    recipe: LoadedRecipe,
    *,
    micro_batch_size: int | None,
    subgraphs: int | None,
    fresh: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Capture and shard the recipe's model, and print its figures; ``check`` compares it with the eager module."""
    begin = perf_counter()
    model = PlanningModel(recipe, fresh=fresh)
    graph = model.graph(micro_batch_size or default_micro_batch_size(recipe))
    sharding = model.sharding(graph, subgraphs)
    record = {
        "micro_batch_size": graph.micro_batch_size,
        "parameters": sum(prod(value.shape) for value in graph.parameters.values()),
        "parameter_bytes": sum(value.bytes for value in graph.parameters.values()),
        "flops": sum(node.flops for node in graph.nodes),
        "backward_flops": sum(node.backward_flops for node in graph.nodes),
        "operations": len(graph.nodes),
        "subgraphs": len(sharding.subgraphs),
        "common": sharding.common,
        "first_user": sharding.first_user,
        "seconds": perf_counter() - begin,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "cached": not model.captured,
        "graph": graph.fingerprint,
    }
    if check:
        record["check"] = check_at(recipe, graph.micro_batch_size)
    if as_json:
        print_json(record)
    else:
        print(_figures(record))


def _figures(record: dict[str, Any]) -> str:
    common = ", ".join(f"{name} ({users})" for name, users in record["common"].items())
    inputs = ", ".join(f"{name} ({subgraph})" for name, subgraph in record["first_user"].items())
    how = "from the cache" if record["cached"] else "captured"
    rows = [
        ("parameters", f"{record['parameters']:,}"),
        ("", f"{record['parameter_bytes'] / 2**30:.3g} GiB"),
        ("forward", f"{record['flops'] / 1e12:.4g} TFLOP per micro-batch of {record['micro_batch_size']}"),
        ("backward", f"{record['backward_flops'] / 1e12:.4g} TFLOP"),
        ("operations", f"{record['operations']:,}"),
        ("subgraphs", f"{record['subgraphs']:,}"),
        ("common nodes (users)", common or "none"),
        ("inputs (first subgraph)", inputs),
        ("time taken", f"{record['seconds']:.2f} s, {how}"),
        ("peak memory taken", f"{record['peak_bytes'] / 2**20:,.0f} MiB"),
    ]
    if "check" in record:
        rows.append(("check", record["check"]))
    return tabulate(rows, tablefmt="plain", disable_numparse=True)
