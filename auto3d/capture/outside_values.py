"""Clocks, entropy and seeds: values from outside that a forward would read anew each time, and a program would not."""

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._pytree import tree_leaves

from auto3d.capture.errors import CaptureError, frame_line, is_model_code, node_line
from auto3d.capture.python_state import user_modules

_FROZEN = "a captured program would use its value of this moment for ever; {}"
_CLOCK = f"reads a clock{{line}}: {_FROZEN.format('read it outside of forward')}"
_ENTROPY = f"draws random bytes{{line}}: {_FROZEN.format('draw with torch, as in torch.rand, there')}"
_SEED = "reads or sets torch's random seed{line}: every random operation is seeded by the plan; remove it there"
_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")
_SEEDS = ("manual_seed", "seed", "initial_seed", "set_rng_state")


@contextmanager
def refused_outside_values(model: nn.Module) -> Iterator[None]:
    """Raise CaptureError where the code of ``model`` reads a clock, draws entropy, or handles torch's seed."""
    problems = [
        *((time, name, _CLOCK) for name in _CLOCKS),
        (os, "urandom", _ENTROPY),
        (random, "_urandom", _ENTROPY),
        *((owner, name, _SEED) for owner in (torch, torch.random) for name in _SEEDS),
        *((torch.cuda, name, _SEED) for name in ("manual_seed", "manual_seed_all")),
    ]
    refusing = {id(original): _refusing(original, problem) for original, problem in _originals(problems)}
    with ExitStack() as stack:
        for owner, name, _ in problems:
            stack.enter_context(patch.object(owner, name, refusing[id(getattr(owner, name))]))
        for module in user_modules(model):  # modules that imported the function by its name
            imported = {name: refusing[id(value)] for name, value in vars(module).items() if id(value) in refusing}
            stack.enter_context(patch.multiple(module, **imported) if imported else ExitStack())
        yield


def check_generators(program: fx.Graph) -> None:
    """Raise CaptureError where an operation draws from a generator of the model's own."""
    for node in program.nodes:
        if any(isinstance(value, torch.Generator) for value in tree_leaves((node.args, node.kwargs))):
            raise CaptureError(
                f"{node.target} draws from a torch.Generator{node_line(node)}: every random operation is seeded by the "
                "plan; leave the generator out there"
            )


def _originals(problems: list[tuple[Any, str, str]]) -> Iterator[tuple[Callable, str]]:
    for owner, name, problem in problems:
        yield getattr(owner, name), problem


def _refusing(original: Callable, problem: str) -> Callable:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if get_proxy_mode() is not None:
            frame = _caller(sys._getframe(1), through_library=problem is _ENTROPY)
            if frame is not None and is_model_code(frame.f_code.co_filename):
                raise CaptureError(f"the model {problem.format(line=frame_line(frame))}")
        return original(*args, **kwargs)

    return refuse


def _caller(frame: FrameType | None, *, through_library: bool) -> FrameType | None:
    """The frame that calls, or, ``through_library``, that makes the standard library call."""
    while through_library and frame is not None and _is_library(frame):
        frame = frame.f_back
    return frame


def _is_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in sys.stdlib_module_names
