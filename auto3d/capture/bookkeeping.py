"""Make torch's own bookkeeping of a trace quick.

An export reads the metadata of each parameter and of each new node some forty times, and each read passes three torch
function modes that are there for the model's code. This took a quarter of the time to capture a deep model. For each
new node it reads the source line of every function that is being called, most of which are torch's own. And it writes
each program that it makes on the way as Python code, which nothing runs.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch.export import _trace
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.utils import _traceback

_BOOKKEEPING = ((proxy_tensor, "track_tensor_tree"), (_trace, "_fakify_params_buffers"))


@contextmanager
def quick_bookkeeping() -> Iterator[None]:
    """Let an export inside note the tensors of its nodes, and make its own of the parameters, without modes.

    A frame of a stack trace then gets its source line where it is printed, and a program its code where it is run.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.object(_traceback, "_extract_symbolized_tb", _without_lines))
        stack.enter_context(_use_lazy_graph_module(True))
        for module, name in _BOOKKEEPING:
            stack.enter_context(patch.object(module, name, _without_modes(getattr(module, name))))
        yield


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


def _without_lines(frames: Sequence[Mapping[str, Any]], skip: int) -> traceback.StackSummary:
    """What the function of torch that this replaces gives, the outermost frame first, without the source lines."""
    stack = traceback.StackSummary()
    for frame in reversed(frames[skip:]):
        stack.append(traceback.FrameSummary(frame["filename"], frame["line"], frame["name"], lookup_line=False))
    return stack
