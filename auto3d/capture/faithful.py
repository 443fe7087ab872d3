"""Trace a module such that a run of the program does all that the module does in eager mode; refuse the rest."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from auto3d.capture.autograd_functions import AutogradFunctions
from auto3d.capture.empty import has_values
from auto3d.capture.errors import CaptureError
from auto3d.capture.gradient_hooks import check_no_gradient_hooks, refused_in_forward
from auto3d.capture.outside_values import Entropy, check_generators, refused_outside_values
from auto3d.capture.python_state import Change, Observation, observed


def trace(model: nn.Module, export: Callable[[], ExportedProgram]) -> ExportedProgram:
    """The program that ``export`` makes of ``model``, including the custom autograd Functions that it calls.

    Raises CaptureError, with the line of the model's code, for anything that a run of the program would leave out.
    """
    check_no_gradient_hooks(model)
    first = _traced(model, export)
    if first.observation.changes:
        _check_repeats(model, export, first)
    if first.entropy.refusals:
        _check_entropy(model, export, first)
    first.functions.replace_calls(first.exported.graph_module)
    for graph in _graphs(first.exported):
        check_generators(graph)
    return first.exported


@dataclass(frozen=True)
class _Traced:
    exported: ExportedProgram
    functions: AutogradFunctions
    observation: Observation
    entropy: Entropy


def _traced(model: nn.Module, export: Callable[[], ExportedProgram], random_bytes: int | None = None) -> _Traced:
    functions, entropy = AutogradFunctions(), Entropy(random_bytes)
    outside = refused_outside_values(model, entropy)
    with functions.recorded(), refused_in_forward(), outside, observed(model) as observation:
        exported = export()
    return _Traced(exported, functions, observation, entropy)


def _check_entropy(model: nn.Module, export: Callable[[], ExportedProgram], first: _Traced) -> None:
    """Raise CaptureError unless the program is the same whatever random bytes the model's code draws."""
    written = _written(first.exported)
    for random_bytes in (0, 255):
        if _written(_traced(model, export, random_bytes).exported) != written:
            raise CaptureError(first.entropy.refusals[0])


def _check_repeats(model: nn.Module, export: Callable[[], ExportedProgram], first: _Traced) -> None:
    """Raise CaptureError unless a second forward, from the state after the first, does the same and changes nothing.

    So a value that is written once, such as a cached size, is accepted, and a counter is refused.
    """
    changes, state = first.observation.changes, first.observation.state
    state.set_attributes(first.observation.last_attributes)
    try:
        second = _traced(model, export)
    except Exception:  # it uses a tensor of the first trace
        second = None
    if second is not None:
        changes = second.observation.changes or changes
        if not second.observation.changes and _written(first.exported) == _written(second.exported):
            return
    state.set_attributes(first.observation.first_attributes)
    raise _refusal(changes[0], model, export)


def _refusal(change: Change, model: nn.Module, export: Callable[[], ExportedProgram]) -> CaptureError:
    line = change.line(lambda: _traced(model, export))
    if "random" in change.owner.described:
        return CaptureError(
            f"{type(model).__name__} draws from {change}{line}: a captured program would repeat the same draw in every "
            "iteration; draw with torch, as in torch.rand, and select with torch.where"
        )
    return CaptureError(
        f"{type(model).__name__} changes {change} in forward{line}: a captured program would repeat the first forward; "
        "make it a buffer, or change it outside of forward"
    )


def _graphs(exported: ExportedProgram) -> list[fx.Graph]:
    return [module.graph for module in exported.graph_module.modules() if isinstance(module, fx.GraphModule)]


def _written(exported: ExportedProgram) -> tuple:
    """A comparable description of a program: equal for two programs that do the same."""
    nodes = [(n.op, n.name, str(n.target), str(n.args), str(n.kwargs)) for g in _graphs(exported) for n in g.nodes]
    constants = {
        name: value.tolist() if has_values(value) else (value.shape, value.dtype)
        for name, value in exported.constants.items()
        if isinstance(value, torch.Tensor)
    }
    return nodes, constants
