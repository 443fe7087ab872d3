"""`auto3d partition`: prints the stages of a recipe's model, and writes its picture and plan."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tabulate import tabulate

from auto3d.errors import InputError
from auto3d.partition.draw_svg import draw_partition_svg
from auto3d.search.partitioned import check_runs, plan_of
from auto3d.words import counted
from launch.console.output import print_json, write_text
from launch.model.profile import how_to_measure
from launch.model.stages import PartitionedModel, PartitionFigures, partition_model
from launch.recipe.load import LoadedRecipe


def print_partition(
    recipe: LoadedRecipe, *, as_json: bool, svg: str | None, plan_file: str | None, **options: Any
) -> None:
    """Cut the recipe's model into stages and print them; ``options`` go to ``partition_model``.

    ``svg``: file for a picture. ``plan_file``: file for the plan of these stages, which `auto3d train --plan` takes.
    """
    partitioned = partition_model(recipe, equal_slices=plan_file is not None, **options)
    if svg:
        write_text(svg, _picture(recipe, partitioned))
    if plan_file:
        plan = plan_of(partitioned.partition, partitioned.request, seed=recipe.values.training.seed)
        check_runs(plan, partitioned.request.graph_at)
        write_text(plan_file, plan.to_json() + "\n")
    if as_json:
        print_json(asdict(partitioned.figures))
        return
    print(_table(partitioned.figures))
    if partitioned.figures.candidates:
        print(_candidates(recipe, partitioned.figures))
    if not plan_file and (cannot := _why_not_run(partitioned)):
        print(cannot)
    if svg:
        print(f"written: {svg}")
    if plan_file:
        print(f"to train under this plan: {recipe.command('train', '--plan', plan_file, without='plan')}")


def _picture(recipe: LoadedRecipe, partitioned: PartitionedModel) -> str:
    figures = partitioned.figures
    notes = [f"{stage.flops_share:.1%}, {_short(stage.parameters)} parameters" for stage in figures.stages]
    stages = counted(len(notes), "stage")
    caption = f"{recipe.name}, {figures.method}, {stages}: balance {figures.balance:.3f} (max / mean FLOPs)"
    return draw_partition_svg(partitioned.request.graph, partitioned.sharding, partitioned.partition, notes, caption)


def _table(figures: PartitionFigures) -> str:
    headings = ["stage", "subgraphs", "parameters", "FLOPs", "time", "sent onward", "replicas", "modules"]
    rows = [
        (
            index,
            _span(stage.subgraphs),
            _short(stage.parameters),
            f"{stage.flops_share:.1%}",
            f"{(stage.forward_s + stage.backward_s) * 1e3:.3g} ms",
            f"{stage.send_bytes / 2**20:.4g} MiB" if stage.sent else "",
            stage.replicas,
            " … ".join(dict.fromkeys((stage.modules[0], stage.modules[-1]))) if stage.modules else "",
        )
        for index, stage in enumerate(figures.stages)
    ]
    align = ["right", "left", *["right"] * 5, "left"]
    balance = f"FLOPs {figures.balance:.3f}, time {figures.time_balance:.3f}"
    return (
        f"{tabulate(rows, headings, colalign=align, disable_numparse=True)}\n\n"
        f"balance (max / mean): {balance}; {figures.method}, {counted(figures.subgraphs, 'subgraph')}, micro-batches "
        f"of {counted(figures.micro_batch_size, 'sample')}; time is predicted, forward and backward, on the slowest "
        f"kind of device{_measured(figures)}"
    )


def _candidates(recipe: LoadedRecipe, figures: PartitionFigures) -> str:
    """How many of RaNNC's candidate stages were measured."""
    measured = figures.measured_candidates
    added_up = figures.candidates - measured
    command = how_to_measure(recipe, "") if added_up else ""
    how = f"; {command} --stages runs them" if command else ""
    return f"candidate stages: {measured} measured, {added_up} added up from the times of their operations{how}"


def _why_not_run(partitioned: PartitionedModel) -> str:
    """Why auto3d cannot train with the stages and micro-batches that a method chose; empty if it can.

    Where stages are of the micro-batches that the caller chose, nothing is said.
    """
    partition, request = partitioned.partition, partitioned.request
    if partition.micro_batches is None:
        return ""
    slices = partition.pipelines * partition.micro_batches  # micro-batches of the global batch
    for stage, replicas in enumerate(partition.replicas):
        copies = replicas // partition.pipelines
        if request.global_batch % (slices * copies):
            whole, parts = counted(request.global_batch, "sample"), counted(slices, "micro-batch", "micro-batches")
            return (
                f"auto3d cannot train with these: the {counted(copies, 'replica')} of stage {stage} would get unequal "
                f"slices of {whole} in {parts}; --plan FILE finds stages with equal ones"
            )
    try:
        check_runs(plan_of(partition, request, seed=0), request.graph_at)
    except InputError as error:
        return f"auto3d cannot train with these: {error}"
    return ""


def _measured(figures: PartitionFigures) -> str:
    return f", from what {figures.measured_in} measured" if figures.measured_in else ""


def _span(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    if numbers[-1] - numbers[0] + 1 == len(numbers):
        return f"{len(numbers)} ({numbers[0]} to {numbers[-1]})"
    return f"{len(numbers)} in {numbers[0]} to {numbers[-1]}"


def _short(number: float) -> str:
    """Four digits with a letter for the size: 1.636M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return f"{number:g}"
