"""`auto3d partition`: cut a recipe's model into stages by a method, and tell what each of them is."""

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

from tabulate import tabulate

from auto3d.capture.graph import Graph
from auto3d.cluster import Cluster, Link
from auto3d.cost.times import times_of
from auto3d.cost.training_options import MOMENTS
from auto3d.cost.work import ELEMENT_BYTES, PRECISION_BYTES, work_of
from auto3d.partition import Partition, PartitionRequest, partition
from auto3d.partition.cost import PartitionCosts, parameter_bytes
from auto3d.partition.draw_svg import draw_svg
from auto3d.partition.merak import Sharding
from auto3d.partition.stage import Stage, cut
from auto3d.search.partitioned import plan_of
from launch.console.output import print_json, write_text
from launch.model.graphs import PlanningModel, default_micro_batch_size
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import cluster, training, with_memory


def print_partition(
    recipe: LoadedRecipe,
    *,
    method: str,
    stages: int | None,
    subgraphs: int | None,
    micro_batch_size: int | None,
    memory_gib: float | None,
    fresh: bool,
    as_json: bool,
    svg: str | None,
    plan_file: str | None,
) -> None:
    """Cut the recipe's model by ``method`` and print its stages; costs are those of the slowest device of its cluster.

    ``memory_gib``: of a device, instead of the recipe's.
    ``plan_file``: write the plan of these stages there, for `auto3d train --plan`.
    """
    model = PlanningModel(recipe, fresh=fresh)
    graph_at = cache(model.graph)
    machine = cluster(recipe)
    if memory_gib is not None:
        machine = with_memory(machine, memory_gib * 2**30)
    sharding = model.sharding(graph_at(micro_batch_size or default_micro_batch_size(recipe)), subgraphs)
    request = PartitionRequest(
        graph_at=graph_at,
        costs_of=costs_on(machine, recipe, stages=stages),
        cuts=sharding.bounds,
        stages=stages,
        micro_batch_size=micro_batch_size or default_micro_batch_size(recipe),
        global_batch=recipe.values.training.global_batch,
        nodes=len(machine.nodes),
        devices_per_node=machine.devices_per_node,
        equal_slices=plan_file is not None,
    )
    graph, costs = request.graph, request.costs
    found = partition(method, request)
    record = {
        "method": method,
        "graph": graph.fingerprint,
        "micro_batch_size": graph.micro_batch_size,
        "device": machine.slowest(range(machine.devices)).name,  # the slowest kind
        "memory_bytes": machine.memory_bytes,
        "subgraphs": len(sharding.subgraphs),
        "micro_batches": found.micro_batches,
        "pipelines": found.pipelines,
        **_record(graph, sharding, costs, found),
    }
    if svg:
        notes = [f"{stage['flops_share']:.1%}, {_count(stage['parameters'])} parameters" for stage in record["stages"]]
        caption = f"{recipe.name}, {method}, {len(notes)} stages: balance {record['balance']:.3f} (max / mean FLOPs)"
        write_text(svg, draw_svg(graph, sharding, found, notes, caption))
    if plan_file:
        plan = plan_of(found, request, seed=recipe.values.training.seed)
        write_text(plan_file, plan.to_json() + "\n")
    if as_json:
        print_json(record)
        return
    print(_table(record))
    if svg:
        print(f"written: {svg}")
    if plan_file:
        print(f"train under it: {recipe.command('train', '--plan', plan_file, without='plan')}")


def costs_on(machine: Cluster, recipe: LoadedRecipe, *, stages: int | None) -> Callable[[Graph], PartitionCosts]:
    """What operations cost on ``machine``, wherever a stage comes to lie: on its slowest kind, with the least memory.

    Messages take the slowest link among the first ``stages`` devices; None: inside the first node.
    """
    accelerator, how = machine.slowest(range(machine.devices)), training(recipe.values)
    link = _slowest_link(machine, machine.nodes[0].devices if stages is None else min(stages, machine.devices))
    weight = PRECISION_BYTES[how.precision]
    state = weight + how.sync_bytes + how.master_bytes + 4 * MOMENTS[how.optimizer]

    def costs_of(graph: Graph) -> PartitionCosts:
        everything = (0, len(graph.nodes))  # only tensor parallelism asks for subgraphs
        work = work_of(graph, everything, precision=how.precision, fused=recipe.values.prediction.fused)
        times = times_of(work, accelerator)
        return PartitionCosts(
            forward_s=tuple(map(float, times.forward[1:] - times.forward[:-1])),
            backward_s=tuple(map(float, times.backward[1:] - times.backward[:-1])),
            latency_s=link.latency_s,
            bandwidth=link.bandwidth,
            memory_bytes=float("inf") if machine.memory_bytes is None else machine.memory_bytes,
            state_factor=state / ELEMENT_BYTES,
            activation_factor=weight / ELEMENT_BYTES,
        )

    return costs_of


def _slowest_link(machine: Cluster, devices: int) -> Link:
    """Of the links that the first ``devices`` talk to their neighbours over."""
    nodes = [machine.nodes[number] for number in dict.fromkeys(machine.node_of[:devices])]
    inside = [node.inside for node in nodes if node.devices > 1]
    outside = [node.outside for node in nodes if node.outside is not None and len(nodes) > 1]
    return min([*inside, *outside] or [nodes[0].inside], key=lambda link: link.bandwidth)


def _record(graph: Graph, sharding: Sharding, costs: PartitionCosts, found: Partition) -> dict[str, Any]:
    """Per stage, of one micro-batch; FLOPs include operations that are repeated. Balance is that of one replica."""
    built = cut(graph, found.stages)
    position_of = {node.name: position for position, node in enumerate(graph.nodes)}
    own = [[p for span in stage.operations for p in range(*span)] for stage in found.stages]
    all_flops = sum(node.flops for node in graph.nodes)
    modules = _whole_modules(graph, own)
    stages = []
    for stage, operations, inside, replicas in zip(built, own, modules, found.replicas, strict=True):
        runs = [position_of[name] for name in stage.nodes]
        forward, backward = sum(costs.forward_s[p] for p in runs), sum(costs.backward_s[p] for p in runs)
        stages.append(
            {
                "subgraphs": _subgraphs(graph, sharding, operations),
                "operations": found.stages[stage.index].operations,
                "modules": inside,
                "parameters": sum(prod(graph.parameters[n].shape) for n in stage.state if n in graph.parameters),
                "parameter_bytes": parameter_bytes(graph, operations),
                "inputs": stage.inputs,
                "flops": stage.flops,
                "backward_flops": sum(graph.nodes[p].backward_flops for p in runs),
                "flops_share": stage.flops / all_flops if all_flops else 0.0,
                "forward_s": forward,
                "backward_s": backward,
                "send_bytes": sum(transfer.value.bytes for transfer in stage.sent),
                "sent": _sent(stage),
                "replicas": replicas,
            }
        )
    return {
        "stages": stages,
        "balance": _balance([stage["flops"] / stage["replicas"] for stage in stages]),
        "time_balance": _balance([(s["forward_s"] + s["backward_s"]) / s["replicas"] for s in stages]),
    }


def _balance(values: Sequence[float]) -> float:
    """Largest over mean: 1 where all are equal."""
    mean = sum(values) / len(values)
    return max(values) / mean if mean else 1.0


def _sent(stage: Stage) -> list[dict[str, Any]]:
    return [
        {"value": transfer.value.name, "bytes": transfer.value.bytes, "to": transfer.target} for transfer in stage.sent
    ]


def _subgraphs(graph: Graph, sharding: Sharding, operations: Sequence[int]) -> list[int]:
    """Those of which the stage has operations of its own."""
    own = {position for position in operations if not graph.nodes[position].from_inputs}
    return [number for number, positions in enumerate(sharding.subgraphs) if not own.isdisjoint(positions)]


def _whole_modules(graph: Graph, own: Sequence[Sequence[int]]) -> list[list[str]]:
    """Per stage the largest modules of which it has all operations; else the parts of a module that it has."""
    stages_of: dict[str, set[int]] = {}
    paths = [
        dict.fromkeys(graph.nodes[position].module for position in operations if not graph.nodes[position].from_inputs)
        for operations in own
    ]
    for stage, modules in enumerate(paths):
        for path in modules:
            for prefix in _prefixes(path):
                stages_of.setdefault(prefix, set()).add(stage)
    found = []
    for modules in paths:
        whole = (next((p for p in _prefixes(path) if len(stages_of[p]) == 1), None) for path in modules)
        found.append(list(dict.fromkeys(path for path in whole if path)))
    return found


def _prefixes(path: str) -> list[str]:
    """``a.b.c`` -> a, a.b, a.b.c."""
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _table(record: dict[str, Any]) -> str:
    headings = ["stage", "subgraphs", "parameters", "FLOPs", "time", "sent onward", "replicas", "modules"]
    rows = [
        (
            index,
            _span(stage["subgraphs"]),
            _count(stage["parameters"]),
            f"{stage['flops_share']:.1%}",
            f"{(stage['forward_s'] + stage['backward_s']) * 1e3:.3g} ms",
            f"{stage['send_bytes'] / 2**20:.4g} MiB" if stage["sent"] else "",
            stage["replicas"],
            " … ".join(dict.fromkeys((stage["modules"][0], stage["modules"][-1]))) if stage["modules"] else "",
        )
        for index, stage in enumerate(record["stages"])
    ]
    align = ["right", "left", *["right"] * 5, "left"]
    balance = f"FLOPs {record['balance']:.3f}, time {record['time_balance']:.3f}"
    return (
        f"{tabulate(rows, headings, colalign=align, disable_numparse=True)}\n\n"
        f"balance (max / mean): {balance}; {record['method']}, {record['subgraphs']} subgraphs, micro-batches of "
        f"{record['micro_batch_size']}; time is predicted, forward and backward, on the slowest kind of device"
    )


def _span(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    if numbers[-1] - numbers[0] + 1 == len(numbers):
        return f"{len(numbers)} ({numbers[0]} to {numbers[-1]})"
    return f"{len(numbers)} in {numbers[0]} to {numbers[-1]}"


def _count(number: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return f"{number:g}"
