"""A module of fake tensors, which have no memory but claim to be on the device that will run the module.

Models query the device of their tensors: a mixture of experts takes one branch on a CPU and another on a GPU, and
tensors made in forward go to the device of the others. So the export must see the real device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.weak import WeakTensorKeyDictionary

from auto3d.capture.errors import CaptureError
from auto3d.capture.held import held_tensors, map_held
from auto3d.capture.skeleton import keep_gradient_hooks, skeleton


@dataclass(frozen=True)
class EmptyModel:
    """A module of fake tensors, with their mode and device."""

    module: nn.Module
    mode: FakeTensorMode
    device: torch.device
    places: WeakTensorKeyDictionary  # fake tensor in an attribute or container -> its place in the module
    views: dict[str, str]  # place of a held tensor that is a view of a parameter -> name of the parameter

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with self.mode:
            return torch.zeros(shape, dtype=dtype, device=self.device)

    def place_of(self, tensor: torch.Tensor) -> str | None:
        """The place of ``tensor`` in the module, if it is one of its ``held_tensors``."""
        return self.places.get(tensor)


def empty_model(build: Callable[[], nn.Module], device: str) -> EmptyModel:
    """The module that ``build`` makes, with only fake tensors on ``device``.

    A plain tensor in an attribute becomes a buffer of that name, since it is state too. If torch was built without
    CUDA, the CPU replaces it. Raises CaptureError for a model with a scripted module.
    """
    module = skeleton(build).model
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise CaptureError(
                f"{name or 'the model'} is a scripted module, which cannot be traced; build it without torch.jit.script"
            )
    parameter_of = {parameter.untyped_storage()._cdata: name for name, parameter in module.named_parameters()}
    storages = {where: tensor.untyped_storage()._cdata for where, tensor in held_tensors(module).items()}
    views = {where: parameter_of[storage] for where, storage in storages.items() if storage in parameter_of}
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    place = torch.device("cpu")
    if device != "cpu" and torch.backends.cuda.is_built():
        # A fake tensor initialises its device, so use the device that this rank has chosen, if any.
        place = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)
    known = WeakTensorKeyDictionary()  # tensor -> its fake tensor, so that a tied tensor stays one tensor
    places = WeakTensorKeyDictionary()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in known:
            shown = FakeTensor(mode, tensor.detach().to("meta"), place)
            if isinstance(tensor, nn.Parameter):  # nn.Parameter does the same to a copy of its argument
                shown.requires_grad_(tensor.requires_grad)
                shown._is_param = True
            known[tensor] = shown
            keep_gradient_hooks(tensor, known[tensor])
        return known[tensor]

    def hold(where: str, tensor: torch.Tensor) -> torch.Tensor:
        places[fake(tensor)] = where
        return fake(tensor)

    map_held(module, hold, fake)
    for owner in module.modules():
        states: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for state in states:
            state.update({name: fake(tensor) for name, tensor in state.items() if tensor is not None})
        for name in [name for name, value in vars(owner).items() if isinstance(value, FakeTensor) and value in places]:
            owner._buffers[name] = owner.__dict__.pop(name)
            owner._non_persistent_buffers_set.add(name)
    return EmptyModel(module, mode, place, places, views)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has elements in memory, as a tensor has that forward makes of numbers in its code."""
    without = isinstance(tensor, FakeTensor) or tensor.is_meta
    return not without and (not tensor.numel() or tensor.untyped_storage().nbytes() > 0)


@contextmanager
def no_idle_conversions() -> Iterator[None]:
    """Let ``module.to(dtype)`` do nothing if nothing would change: a trace cannot replace fake parameters."""
    convert = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        tensors = [*module.parameters(), *module.buffers()]
        moves = device is not None and any(tensor.device.type != device.type for tensor in tensors)
        casts = dtype is not None and any(tensor.is_floating_point() and tensor.dtype != dtype for tensor in tensors)
        return convert(module, *args, **kwargs) if moves or casts else module

    with patch.object(nn.Module, "to", to):
        yield


@contextmanager
def idle_copies_recorded() -> Iterator[None]:
    """Record ``tensor.contiguous()`` as an operation of the program even if the traced tensor is already contiguous.

    The kernel that attention uses, and so the memory layout of its result, depends on the machine, its devices and the
    build of torch. Without this, a plan that is made on a node without GPUs would belong to another program than the
    GPUs capture, and a view that follows would fail after a kernel with another layout.
    """

    def contiguous(tensor: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        return torch.ops.aten.contiguous.default(tensor, memory_format=memory_format)

    with patch.object(torch.Tensor, "contiguous", contiguous):
        yield
