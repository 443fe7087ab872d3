"""The comparison of a capture with its eager module, and of a plan's shards or slices with the capture.

Each is made once, in another process, if the model is small enough.
"""

import signal
from collections.abc import Callable, Iterable
from dataclasses import asdict
from math import prod
from typing import TYPE_CHECKING

from auto3d.capture.graph import Graph
from auto3d.errors import InputError
from auto3d.plan import SUB_PIPELINED, Plan
from auto3d.runtime.measurement import Status
from auto3d.schedule import samples_at_once
from auto3d.schedule.shape import shares_of
from auto3d.share import WHOLE
from launch.model.capture_process import CaptureProcess
from launch.model.graphs import PlanningModel
from launch.model.identity import cache_of, identity_of
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import device
from launch.run.devices import torch_has_cuda, visible_devices
from launch.run.diagnosis import Ending

if TYPE_CHECKING:
    from auto3d.capture.model import CapturedModel

# Limits for a forward and a backward of one micro-batch: about 10 s on two cores
LARGEST_BYTES, LARGEST_FLOPS = 2**30, 1e11
TIMEOUT_S = 300.0
COPIES = 4  # copies of the parameters: weights, gradients of both runs, and one more of the first run's


def bytes_and_flops(graph: Graph) -> tuple[int, int]:
    """Estimated peak memory of the check, and FLOPs of a forward and a backward; the check runs both three times."""
    parameters = sum(value.bytes for value in graph.parameters.values())
    activations = sum(value.bytes for node in graph.nodes if not node.is_view for value in node.outputs)
    return COPIES * parameters + activations, sum(node.flops + node.backward_flops for node in graph.nodes)


def why_not(graph: Graph, *, copies: int = 1) -> str:
    """The reason why this capture is too large to be checked, with so many ``copies`` of it; empty if it is not."""
    needed, flops = bytes_and_flops(graph)
    needed *= copies
    if needed <= LARGEST_BYTES and flops <= LARGEST_FLOPS:
        return ""
    return (
        f"it would take {needed / 2**30:.3g} GiB and {flops / 1e12:.3g} TFLOP; "
        f"the check takes at most {LARGEST_BYTES / 2**30:.3g} GiB and {LARGEST_FLOPS / 1e12:.3g} TFLOP"
    )


def is_checked(recipe: LoadedRecipe, graph: Graph, plan: Plan | None = None) -> bool:
    """Whether this capture, or its shards or slices under ``plan``, has already passed the check."""
    return cache_of(recipe).load(_identity(recipe, graph, plan), lambda content: content["equal"]) is True


def check(recipe: LoadedRecipe, captured: "CapturedModel") -> str:
    """Compare ``captured`` with the eager module; returns one line: what was compared, or why nothing was.

    Raises InputError if the two differ or the comparison crashes. If the check cannot run, for example for lack of
    memory, the line says so.
    """
    return _check(recipe, captured.graph, lambda: captured)


def _check(
    recipe: LoadedRecipe, graph: Graph, captured: "Callable[[], CapturedModel]", plan: Plan | None = None
) -> str:
    """Compare the capture with the eager module or, with ``plan``, the plan's shards or slices with the capture."""
    from launch.model.compare import compare_forked, compare_on_gpu  # it imports torch

    if reason := why_not(graph, copies=1 if plan is None else 2):
        return _not_compared(graph, reason, plan)
    on_gpu = device(recipe.values) == "cuda" and torch_has_cuda() and visible_devices()
    if on_gpu:
        outcome = compare_on_gpu(recipe, graph.micro_batch_size, plan, limit_s=TIMEOUT_S)
    else:
        outcome = compare_forked(recipe, captured(), plan, limit_s=TIMEOUT_S)
    if outcome.ending in (Ending.ABORTED, Ending.DIED) and signal.SIGKILL.name not in outcome.error:
        raise InputError(
            f"{_described(graph)} crashed when it was compared with {_other(plan)}: {outcome.error.splitlines()[-1]}; "
            "it would crash in training too; to try that all the same: training.check_capture=false"
        )
    if outcome.status is not Status.OK:
        return _not_compared(graph, f"{outcome.status}, {outcome.error.splitlines()[-1]}", plan)
    cache_of(recipe).store(_identity(recipe, graph, plan), {"equal": True})
    count = sum(prod(value.shape) for value in graph.parameters.values())
    where = "cuda" if on_gpu else "cpu"
    compared = f"{_other(plan)} in its loss and {count:,} gradients, on {where}"
    return f"{_described(graph)} equals {compared}"


def check_at(recipe: LoadedRecipe, micro_batch_size: int) -> str:
    """As ``check``; captures the recipe's model for micro-batches of this size first."""
    from launch.model.build import captured_model  # it imports torch

    return check(recipe, captured_model(recipe, micro_batch_size))


def check_shares_at(recipe: LoadedRecipe, plan: Plan) -> str:
    """Compare the shards or slices of ``plan`` with the model, captured for it first; returns one line."""
    from launch.model.build import captured_model  # it imports torch

    captured = captured_model(recipe, samples_at_once(plan))
    return _check(recipe, captured.graph, lambda: captured, plan)


def check_once(
    recipe: LoadedRecipe,
    graph: Graph,
    captured: "Callable[[], CapturedModel]",
    plan: Plan,
    tell: Callable[[str], None],
) -> None:
    """Check the capture that ``graph`` describes, and the shards or slices of ``plan`` if it has any.

    What has passed before is not checked again, and nothing is if the recipe switches the check off. ``captured``
    returns the capture, if the check needs it in this process; ``tell`` gets each result, one line.
    """
    if not recipe.values.training.check_capture:
        return
    for divided in [None, plan] if _is_shared(plan) else [None]:
        if not is_checked(recipe, graph, divided):
            tell(_check(recipe, graph, captured, divided))


def check_plans(
    recipe: LoadedRecipe, plans: Iterable[Plan], process: CaptureProcess, tell: Callable[[str], None]
) -> None:
    """Check the captures that ``plans`` run, and their shards and slices, in ``process``; ``tell`` gets a
    line per check."""
    if not recipe.values.training.check_capture:
        return
    plans = list(plans)
    model = PlanningModel(recipe, process=process)
    for size in sorted({samples_at_once(plan) for plan in plans}):
        graph = model.graph(size)
        if reason := why_not(graph):
            tell(_not_compared(graph, reason))
        elif not is_checked(recipe, graph):
            tell(process.call(check_at, recipe, size))
    for plan in {_programs_of(plan): plan for plan in plans if _is_shared(plan)}.values():
        graph = model.graph(samples_at_once(plan))
        if reason := why_not(graph, copies=2):
            tell(_not_compared(graph, reason, plan))
        elif not is_checked(recipe, graph, plan):
            tell(process.call(check_shares_at, recipe, plan))


def _is_shared(plan: Plan) -> bool:
    """Whether operations of ``plan`` run shares of the program: shards of tensor parallelism, or slices."""
    return shares_of(plan)[0] != WHOLE


def _programs_of(plan: Plan) -> tuple:
    """What decides the programs of the plan's shards or slices."""
    return plan.graph, shares_of(plan)[0], frozenset(plan.split.items()), plan.tensor_overlap


def _other(plan: Plan | None) -> str:
    """What the capture is compared with."""
    if plan is None:
        return "the eager module"
    share = shares_of(plan)[0]
    if share.slices > 1:
        of_shards = f", each in {share.tp} shards" if share.tp > 1 else ""
        return f"its {share.slices} slices of the sequence{of_shards}"
    halved = " on half micro-batches" if plan.tensor_overlap == SUB_PIPELINED else ""
    return f"its {plan.tp} shards{halved}{' under sequence parallelism' if share.sequence_parallel else ''}"


def _not_compared(graph: Graph, reason: str, plan: Plan | None = None) -> str:
    return f"{_described(graph)} is not compared with {_other(plan)}: {reason}"


def _described(graph: Graph) -> str:
    return f"the model captured for micro-batches of {graph.micro_batch_size}"


def _identity(recipe: LoadedRecipe, graph: Graph, plan: Plan | None = None) -> dict:
    values = recipe.values
    facts = {"graph": graph.fingerprint, "seed": values.training.seed, "device": values.cluster.device}
    if plan is not None:
        split = {name: asdict(weight_split) for name, weight_split in sorted(plan.split.items())}
        facts |= {"share": asdict(shares_of(plan)[0]), "split": split, "tensor_overlap": plan.tensor_overlap}
    return identity_of(recipe, checked_at=graph.micro_batch_size) | facts
