"""Functions that torch.jit.script compiled, in a trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def scripted_as_written() -> Iterator[None]:
    """Let compiled functions run the Python code that they were made from.

    The compiler may differentiate such a function itself, after its first calls: it detaches the inputs of the
    function's operations, so a trace would see no gradient pass through them.
    """
    compiled = torch.jit.ScriptFunction.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        written = getattr(function, "_torchdynamo_inline", None)  # a function read from a file has none
        return compiled(function, *args, **kwargs) if written is None else written(*args, **kwargs)

    with patch.object(torch.jit.ScriptFunction, "__call__", call):
        yield
