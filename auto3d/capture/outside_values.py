"""Refuse clocks, entropy and seeds: a forward reads them each time, but a captured program would repeat one value.

Entropy that only makes names, as einx does for unnamed axes, changes nothing: the program must be the same under three
draws.
"""

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._pytree import tree_leaves

from auto3d.capture.errors import CaptureError, frame_line, is_model_code, node_line
from auto3d.capture.python_state import user_modules

_FROZEN = "a captured program would repeat the same value in every iteration; {}"
_CLOCK = f"reads a clock{{line}}: {_FROZEN.format('read it outside of forward')}"
_ENTROPY = f"draws random bytes{{line}}: {_FROZEN.format('draw with torch, as in torch.rand, there')}"
_SEED = "reads or sets torch's random seed{line}: the plan seeds every random operation; remove it there"
_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")
_SEEDS = ("manual_seed", "seed", "initial_seed", "set_rng_state")
_COUNTED = 4  # last bytes of a draw that tell it from another draw, so that names stay different


@dataclass
class Entropy:
    """Random bytes for the model's code: the operating system's or, to decide comparisons, all of one value."""

    made_of: int | None = None
    refusals: list[str] = field(default_factory=list, init=False)  # a refusal for each draw, should it matter

    def draw(self, original: Callable[[int], bytes], number: int) -> bytes:
        """As many bytes; ``original`` draws from the operating system."""
        if self.made_of is None:
            return original(number)
        counted = max(0, min(_COUNTED, number - _COUNTED))
        count = (len(self.refusals) % 256**counted).to_bytes(counted, "big")
        return bytes(self.made_of ^ byte for byte in bytes(number - counted) + count)


@contextmanager
def refused_outside_values(model: nn.Module, entropy: Entropy) -> Iterator[None]:
    """Inside, raise CaptureError where the code of ``model`` reads a clock, or reads or sets a seed.

    Where it draws random bytes, they come from ``entropy``, which notes it.
    """
    problems = [
        *((time, name, _CLOCK) for name in _CLOCKS),
        (os, "urandom", _ENTROPY),
        (random, "_urandom", _ENTROPY),
        *((owner, name, _SEED) for owner in (torch, torch.random) for name in _SEEDS),
        *((torch.cuda, name, _SEED) for name in ("manual_seed", "manual_seed_all")),
    ]
    refusing = {id(original): _refusing(original, problem, entropy) for original, problem in _originals(problems)}
    with ExitStack() as stack:
        for owner, name, _ in problems:
            stack.enter_context(patch.object(owner, name, refusing[id(getattr(owner, name))]))
        for module in user_modules(model):  # these may have imported the function by its name
            imported = [name for name, value in vars(module).items() if id(value) in refusing]
            for name in imported:
                stack.enter_context(patch.object(module, name, refusing[id(vars(module)[name])]))
        yield


def check_generators(program: fx.Graph) -> None:
    """Raise CaptureError if an operation draws from a torch.Generator of the model."""
    for node in program.nodes:
        if any(isinstance(value, torch.Generator) for value in tree_leaves((node.args, node.kwargs))):
            raise CaptureError(
                f"{node.target} draws from a torch.Generator{node_line(node)}: the plan seeds every random operation; "
                "draw without a generator there"
            )


def _originals(problems: list[tuple[Any, str, str]]) -> Iterator[tuple[Callable, str]]:
    for owner, name, problem in problems:
        yield getattr(owner, name), problem


def _refusing(original: Callable, problem: str, entropy: Entropy) -> Callable:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if get_proxy_mode() is not None:
            frame = _caller(sys._getframe(1), through_library=problem is _ENTROPY)
            if frame is not None and is_model_code(frame.f_code.co_filename):
                refusal = f"the model {problem.format(line=frame_line(frame))}"
                if problem is not _ENTROPY:
                    raise CaptureError(refusal)
                entropy.refusals.append(refusal)
                return entropy.draw(original, *args)
        return original(*args, **kwargs)

    return refuse


def _caller(frame: FrameType | None, *, through_library: bool) -> FrameType | None:
    """``frame``, or with ``through_library`` the nearest caller outside of the standard library."""
    while through_library and frame is not None and _is_library(frame):
        frame = frame.f_back
    return frame


def _is_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in sys.stdlib_module_names
