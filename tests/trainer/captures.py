"""Captures that the tests share: many of them train one model, whose capture takes longer than its training.

A capture reads the module that it builds, but no values of its tensors. So where a module is of the code of torch and
transformers alone, and equal to an earlier one in its plain values, shapes and ties, its capture is equal too: it is
loaded as tests.models.captured loads captures. Any other model is captured each time.
"""

import fcntl
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import GenerationConfig, PretrainedConfig

import auto3d.capture.model
import auto3d.planner
import auto3d.trainer.planned
from auto3d.capture.block_state import OF_EVERY_MODULE
from auto3d.capture.cache import Cache, default_folder
from auto3d.capture.empty import empty_model
from auto3d.capture.export import TRAINING, InputSpec, Mode
from auto3d.capture.model import CapturedModel, capture
from auto3d.capture.program_json import NotStorableError, captured_from_json, captured_to_json
from auto3d.capture.repeats import HOOKS

LIBRARIES = ("torch.", "transformers.")
PLAIN = (bool, int, float, str, type(None), torch.dtype)


class OtherCodeError(Exception):
    """A module has something that no plain values describe."""


def share_captures() -> None:
    """From here on, this process loads captures that it or another process of the tests has made."""
    for module in (auto3d.capture.model, auto3d.planner, auto3d.trainer.planned):
        module.capture = shared_capture  # type: ignore[attr-defined]


def shared_capture(
    build: Callable[[], nn.Module],
    inputs: Mapping[str, InputSpec],
    micro_batch_size: int,
    *,
    device: str = "cpu",
    mode: Mode = TRAINING,
    precision: str = "float32",
    told: Collection[CodeType] = (),
) -> CapturedModel:
    """What ``capture`` returns, made or loaded."""
    make = partial(capture, build, inputs, micro_batch_size, device=device, mode=mode, precision=precision, told=told)
    traits = None
    with suppress(OtherCodeError):
        traits = traits_of(empty_model(build, device).module)
    if traits is None:
        return make()
    said = (traits, sorted(inputs.items()), micro_batch_size, device, mode, precision)
    identity = {"captured by": capture.__qualname__, "traits": sha256(repr(said).encode()).hexdigest()}
    with (default_folder().parent / f"auto3d-test-{identity['traits']}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first of several ranks captures
        cache = Cache()
        found = cache.load(identity, partial(captured_from_json, build=build))
        if found is None:
            found = make()
            with suppress(NotStorableError):
                cache.store(identity, captured_to_json(found))
        return found


def traits_of(model: nn.Module) -> list[Any]:
    """All that a capture can read of ``model``, as values that every process prints alike.

    Raises OtherCodeError where its code is not that of libraries alone.
    """
    if any(getattr(torch_module, f"_global{each}", None) for each in HOOKS):
        raise OtherCodeError
    first: dict[int, str] = {}  # a tensor or module that has several names is a tie
    traits: list[Any] = []
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise OtherCodeError
        tie = first.setdefault(id(tensor), name)
        traits.append((name, tie, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad))
    for name, module in model.named_modules(remove_duplicate=False):
        if any(getattr(module, each) for each in HOOKS):
            raise OtherCodeError
        own = {key: value for key, value in vars(module).items() if key not in OF_EVERY_MODULE}
        tie = first.setdefault(id(module), name)
        traits.append((name, tie, of_library(type(module)), of_library(type(module).forward), plain(own)))
    return traits


def plain(value: Any) -> Any:
    """Something that prints alike for equal values."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple):
        return type(value).__name__, [plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(repr(plain(each)) for each in value)
    if isinstance(value, dict):
        return type(value).__name__, [(plain(key), plain(each)) for key, each in value.items()]
    if isinstance(value, PretrainedConfig | GenerationConfig):
        return type(value).__name__, plain(dict(sorted(vars(value).items())))  # a set of names made their order
    return of_library(value)


def of_library(value: Any) -> str:
    """The name of a class or function of a library, whose code has no state of its own."""
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "<locals>")
    bound = not isinstance(getattr(value, "__self__", None), (ModuleType, type(None)))
    if not f"{module}.".startswith(LIBRARIES) or "<locals>" in name or bound:
        raise OtherCodeError
    return f"{module}.{name}"
