"""Trace a module so that nothing of what it does in eager mode is lost; what cannot be kept is refused."""

from collections.abc import Callable

from torch import nn
from torch.export import ExportedProgram

from auto3d.capture.autograd_functions import AutogradFunctions
from auto3d.capture.gradient_hooks import check_no_gradient_hooks, refused_in_forward


def trace(model: nn.Module, export: Callable[[], ExportedProgram]) -> ExportedProgram:
    """The program that ``export`` makes of ``model``, with the custom autograd Functions that it calls.

    Raises CaptureError, with the line of the model's code, for what a run of the program would not do.
    """
    check_no_gradient_hooks(model)
    functions = AutogradFunctions()
    with functions.recorded(), refused_in_forward():
        exported = export()
    functions.replace_calls(exported.graph_module)
    return exported
