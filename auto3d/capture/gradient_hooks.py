"""Refuse models with gradient hooks, which a trace would drop silently.

Forward hooks and forward pre-hooks need no check: the trace runs them, and their operators become part of the program.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules import module as torch_module
from torch.utils import checkpoint

from auto3d.capture.errors import CaptureError, calling_line

WAY_OUT = "a captured program would not run it; remove it, or do the same with operators in forward"
_CHANGE_NOTHING = (save_on_cpu, checkpoint._checkpoint_hook, checkpoint._recomputation_hook)


def check_no_gradient_hooks(model: nn.Module) -> None:
    """Raise CaptureError if ``model`` has a gradient hook: on a parameter, on a module, or on all modules of torch."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(f"the parameter {name} of {type(model).__name__} has a gradient hook; {WAY_OUT}")
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            where = f"the module {name} ({type(module).__name__})" if name else type(model).__name__
            raise CaptureError(f"{where} has a backward hook; {WAY_OUT}")
    if torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
        raise CaptureError(f"torch has a global backward hook for all modules; {WAY_OUT}")


@contextmanager
def refused_in_forward() -> Iterator[None]:
    """Inside, raise CaptureError where traced code registers a gradient hook or computes a gradient itself."""
    hook = f"registers a gradient hook{{line}}; {WAY_OUT}"
    packing = f"changes what autograd saves, with a hook{{line}}; {WAY_OUT}"
    inner = "computes a gradient inside forward{line}, which a captured program cannot do; write its formula there"
    with ExitStack() as stack:
        for owner, name, problem in (
            (torch.Tensor, "register_hook", hook),
            (torch.Tensor, "register_post_accumulate_grad_hook", hook),
            (torch.autograd.graph, "register_multi_grad_hook", hook),
            (nn.Module, "register_full_backward_hook", hook),
            (nn.Module, "register_full_backward_pre_hook", hook),
            (nn.Module, "register_backward_hook", hook),
            (saved_tensors_hooks, "__enter__", packing),
            (torch.autograd, "grad", inner),
            (torch.autograd, "backward", inner),
        ):
            stack.enter_context(patch.object(owner, name, _refusing(getattr(owner, name), problem)))
        yield


def _refusing(original: Callable, problem: str) -> Callable:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if get_proxy_mode() is not None and not (args and isinstance(args[0], _CHANGE_NOTHING)):
            raise CaptureError(f"the model {problem.format(line=calling_line())}")
        return original(*args, **kwargs)

    return refuse
