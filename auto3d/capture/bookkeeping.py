"""Keep torch's own bookkeeping of a trace from going through the torch function modes of that trace.

An export reads the metadata of each parameter and of each new node some forty times, and each read passes three modes
that are there for the model's code. This took a quarter of the time to capture a deep model.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch.export import _trace
from torch.fx.experimental import proxy_tensor

_BOOKKEEPING = ((proxy_tensor, "track_tensor_tree"), (_trace, "_fakify_params_buffers"))


@contextmanager
def bookkeeping_unobserved() -> Iterator[None]:
    """Let an export inside note the tensors of its nodes, and make its own of the parameters, without modes."""
    with ExitStack() as stack:
        for module, name in _BOOKKEEPING:
            stack.enter_context(patch.object(module, name, _without_modes(getattr(module, name))))
        yield


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call
