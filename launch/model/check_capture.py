"""The comparison of a capture with its eager module: once, in another process, if the model is small enough."""

from collections.abc import Callable, Iterable
from math import prod
from typing import TYPE_CHECKING

from auto3d.capture.cache import Cache
from auto3d.capture.graph import Graph
from auto3d.plan import Plan
from auto3d.runtime.measurement import Status
from auto3d.schedule import samples_at_once
from launch.model.capture_process import CaptureProcess
from launch.model.graphs import PlanningModel
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import device
from launch.run.devices import torch_has_cuda, visible_devices

if TYPE_CHECKING:
    from auto3d.capture.model import CapturedModel

# Limits for a forward and a backward of one micro-batch: about 10 s on two cores
LARGEST_BYTES, LARGEST_FLOPS = 2**30, 1e11
TIMEOUT_S = 300.0
COPIES = 4  # copies of the parameters: weights, gradients of both runs, and one more of the first run's


def bytes_and_flops(graph: Graph) -> tuple[int, int]:
    """Estimated peak memory of the check, and FLOPs of a forward and a backward; the check runs three of each."""
    parameters = sum(value.bytes for value in graph.parameters.values())
    activations = sum(value.bytes for node in graph.nodes if not node.is_view for value in node.outputs)
    return COPIES * parameters + activations, sum(node.flops + node.backward_flops for node in graph.nodes)


def why_not(graph: Graph) -> str:
    """The reason why this capture is too large to be checked; empty if it is not."""
    needed, flops = bytes_and_flops(graph)
    if needed <= LARGEST_BYTES and flops <= LARGEST_FLOPS:
        return ""
    return (
        f"it would take {needed / 2**30:.3g} GiB and {flops / 1e12:.3g} TFLOP; "
        f"the check takes at most {LARGEST_BYTES / 2**30:.3g} GiB and {LARGEST_FLOPS / 1e12:.3g} TFLOP"
    )


def is_checked(recipe: LoadedRecipe, graph: Graph) -> bool:
    """Whether this capture has already passed the check."""
    return Cache().load(_identity(recipe, graph), lambda content: content["equal"]) is True


def check(recipe: LoadedRecipe, captured: "CapturedModel") -> str:
    """Compare ``captured`` with the eager module; returns one line: what was compared, or why nothing was.

    Raises InputError if the two differ. If the check cannot run, for example for lack of memory, the line says so.
    """
    return _check(recipe, captured.graph, lambda: captured)


def _check(recipe: LoadedRecipe, graph: Graph, captured: "Callable[[], CapturedModel]") -> str:
    from launch.model.compare import compare_forked, compare_on_gpu  # it imports torch

    if reason := why_not(graph):
        return _not_compared(graph, reason)
    on_gpu = device(recipe.values) == "cuda" and torch_has_cuda() and visible_devices()
    if on_gpu:
        outcome = compare_on_gpu(recipe, graph.micro_batch_size, timeout_s=TIMEOUT_S)
    else:
        outcome = compare_forked(recipe, captured(), timeout_s=TIMEOUT_S)
    if outcome.status is not Status.OK:
        return _not_compared(graph, f"{outcome.status}, {outcome.error.splitlines()[-1]}")
    Cache().store(_identity(recipe, graph), {"equal": True})
    count = sum(prod(value.shape) for value in graph.parameters.values())
    where = "cuda" if on_gpu else "cpu"
    return f"{_described(graph)} equals the eager module in its loss and {count:,} gradients, on {where}"


def check_at(recipe: LoadedRecipe, micro_batch_size: int) -> str:
    """As ``check``; captures the recipe's model for micro-batches of this size first."""
    from launch.model.build import captured_model  # it imports torch

    return check(recipe, captured_model(recipe, micro_batch_size))


def check_once(
    recipe: LoadedRecipe, graph: Graph, captured: "Callable[[], CapturedModel]", tell: Callable[[str], None]
) -> None:
    """Check the capture that ``graph`` describes, unless it has passed before or the recipe switches the check off.

    ``captured`` returns the capture, if the check needs it in this process; ``tell`` gets the result, one line.
    """
    if recipe.values.training.check_capture and not is_checked(recipe, graph):
        tell(_check(recipe, graph, captured))


def check_plans(
    recipe: LoadedRecipe, plans: Iterable[Plan], process: CaptureProcess, tell: Callable[[str], None]
) -> None:
    """Check the captures that ``plans`` run, in ``process``; ``tell`` gets a line for each."""
    if not recipe.values.training.check_capture:
        return
    model = PlanningModel(recipe, process=process)
    for size in sorted({samples_at_once(plan) for plan in plans}):
        graph = model.graph(size)
        if reason := why_not(graph):
            tell(_not_compared(graph, reason))
        elif not is_checked(recipe, graph):
            tell(process.call(check_at, recipe, size))


def _not_compared(graph: Graph, reason: str) -> str:
    return f"{_described(graph)} is not compared with the eager module: {reason}"


def _described(graph: Graph) -> str:
    return f"the model captured for micro-batches of {graph.micro_batch_size}"


def _identity(recipe: LoadedRecipe, graph: Graph) -> dict:
    values = recipe.values
    facts = {"graph": graph.fingerprint, "seed": values.training.seed, "device": values.cluster.device}
    return PlanningModel(recipe).identity(checked_at=graph.micro_batch_size) | facts
