"""Captures that the tests share: many of them train one model, whose capture takes longer than its training.

A capture reads the module that it builds, but no values of its tensors. So where a module is of the code of torch, of
transformers and of these tests alone, here of functions that read no variables of their file, and equal to an earlier
one in its plain values, shapes and ties, its capture is equal too: it is loaded as tests.models.captured loads
captures, or taken from this process if it has it. Any other model is captured each time.
"""

import fcntl
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import GenerationConfig, PretrainedConfig

import auto3d.capture.model
import auto3d.planner
import auto3d.trainer.planned
import auto3d.trainer.trainer
from auto3d.capture.block_state import OF_EVERY_MODULE
from auto3d.capture.cache import Cache, default_folder
from auto3d.capture.empty import empty_model
from auto3d.capture.export import TRAINING, InputSpec, Mode
from auto3d.capture.model import CapturedModel, capture
from auto3d.capture.program_json import NotStorableError, captured_from_json, captured_to_json
from auto3d.capture.repeats import HOOKS
from auto3d.trainer.instance import kept_by_forward
from auto3d.trainer.loss_mean import loss_mean_of
from auto3d.trainer.own_loss import with_loss

OURS = "tests.trainer."
LIBRARIES = ("torch.", "transformers.", OURS)
FORWARD = with_loss(nn.Identity, None, constants={"a constant": 0})().forward.__code__  # all such modules have it
PLAIN = (bool, int, float, str, type(None), torch.dtype)
_HERE: dict[str, CapturedModel] = {}  # captures of this process


class OtherCodeError(Exception):
    """A module has something that no plain values describe."""


def share_captures() -> None:
    """From here on, this process loads captures that it or another process of the tests has made, and tries only once
    what the Trainer asks of equal models."""
    for module in (auto3d.capture.model, auto3d.planner, auto3d.trainer.planned):
        module.capture = shared_capture  # type: ignore[attr-defined]
    auto3d.trainer.trainer.loss_mean_of = LOSS_MEAN_OF  # type: ignore[attr-defined]
    auto3d.trainer.trainer.kept_by_forward = KEPT_BY_FORWARD  # type: ignore[attr-defined]


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of what builds a module and of its inputs, which this process calls once for equal modules."""
    answers: dict[str, Any] = {}

    def of_equal(build: Callable[[], nn.Module], inputs: Mapping[str, InputSpec], **others: Any) -> Any:
        key = key_of(build, inputs, others["device"], others)
        if key is None:
            return function(build, inputs, **others)
        if key not in answers:
            answers[key] = function(build, inputs, **others)
        return answers[key]

    return of_equal


LOSS_MEAN_OF, KEPT_BY_FORWARD = remembered(loss_mean_of), remembered(kept_by_forward)


def key_of(build: Callable[[], nn.Module], inputs: Mapping[str, InputSpec], device: str, *others: Any) -> str | None:
    """A hash of what can be read of the module that ``build`` makes, and of all else; None if it has other code."""
    try:
        traits = traits_of(empty_model(build, device).module)
    except OtherCodeError:
        return None
    return sha256(repr((traits, sorted(inputs.items()), device, *others)).encode()).hexdigest()


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
    key = key_of(build, inputs, device, micro_batch_size, mode, precision)
    if key is None:
        return make()
    if here := _HERE.get(key):
        return replace(here, exported=replace(here.exported, build=build))
    identity = {"captured by": capture.__qualname__, "key": key}
    with (default_folder().parent / f"auto3d-test-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first of several ranks captures
        cache = Cache()
        found = cache.load(identity, partial(from_json, build=build, mode=mode))
        if found is None:
            found = make()
            with suppress(NotStorableError):
                cache.store(identity, to_json(found))
    _HERE[key] = found
    return found


def to_json(captured: CapturedModel) -> dict[str, Any]:
    """``captured``, which may be of an evaluation."""
    of_training = replace(captured, exported=replace(captured.exported, mode=TRAINING, outputs={}))
    outputs = [dict(each.outputs) for each in (captured.exported, captured.graph)]
    return captured_to_json(of_training) | {"outputs": outputs}


def from_json(content: Mapping[str, Any], build: Callable[[], nn.Module], mode: Mode) -> CapturedModel:
    """What ``to_json`` has of a capture in ``mode``."""
    found, (of_exported, of_graph) = captured_from_json(content, build), content["outputs"]
    exported = replace(found.exported, mode=mode, outputs=of_exported)
    return replace(found, exported=exported, graph=replace(found.graph, outputs=of_graph))


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
        for kind in type(module).__mro__:
            for method in vars(kind).values() if kind.__module__.startswith(OURS) else ():
                # __init__ makes what is read here
                if isinstance(method, FunctionType) and method.__name__ != "__init__":
                    check_reads(method)
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
    if getattr(value, "__code__", None) is FORWARD:
        (call,) = (cell.cell_contents for cell in value.__closure__)
        if isinstance(call, partial) and call.func.__func__ is type(call.func.__self__).forward:
            return "constants", plain(call.keywords)
    if isinstance(value, PretrainedConfig | GenerationConfig):
        return type(value).__name__, plain(dict(sorted(vars(value).items())))  # a set of names made their order
    return of_library(value)


def of_library(value: Any) -> str:
    """The name of a class or function of a library, whose code has no state of its own."""
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "<locals>")
    bound = not isinstance(getattr(value, "__self__", None), (ModuleType, type(None)))
    if not f"{module}.".startswith(LIBRARIES) or "<" in name or bound:  # a name with it is of several functions
        raise OtherCodeError
    if isinstance(value, FunctionType):
        check_reads(value)
    return f"{module}.{name}"


def check_reads(function: FunctionType) -> None:
    """Raise OtherCodeError if ``function`` is of these tests and reads a variable of its file."""
    if not function.__module__.startswith(OURS):
        return
    codes = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for name in function.__globals__.keys() & code.co_names:
            if not isinstance(value := function.__globals__[name], (ModuleType, BuiltinFunctionType)):
                of_library(value)
