"""PyTorch on a simulated device: tensors are in CPU memory, but kernels operate on them later."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.streams.machine import Device, Host, Record, Stream, current

_READ_BY_HOST = (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.item, torch.Tensor.__float__)
_EMPTY = (torch.ops.aten.empty, torch.ops.aten.empty_strided, torch.ops.aten.empty_like, torch.ops.aten.new_empty)
_CPU = torch.device("cpu")


class _AsIfOnDevice(TorchFunctionMode):
    """Tensors report that they are on the device; the host waits before it reads their values."""

    def __init__(self, host: Host, allocating: Callable[[], None]) -> None:
        super().__init__()
        self._host = host
        self._allocating = allocating

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.device.__get__:
            return torch.device("cuda", self._host.rank)
        if func is torch.Tensor.is_cuda.__get__:
            return True
        if func in _READ_BY_HOST:
            self._host.synchronize(self._host.device.current.record(f"all before {func.__name__}()"))
        if func is torch.empty:
            self._allocating()
        kwargs = {name: _CPU if isinstance(value, torch.device) else value for name, value in (kwargs or {}).items()}
        return func(*(_CPU if isinstance(value, torch.device) else value for value in args), **kwargs)


class _Kernels(TorchDispatchMode):
    """Turns every operation on data into a kernel on the current stream."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name()
        if func is torch.ops.aten._local_scalar_dense.default:
            return func(*args, **kwargs)
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if written:
            memory = _memory_of((args, kwargs))
            self._device.launch(name, reads=taken, writes=written, effect=lambda: func(*memory[0], **memory[1]))
            return written[0]
        output = func(*args, **kwargs)
        if any(returned.alias_info is not None for returned in func._schema.returns):  # a view
            return output
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            self._device.memory.allocated(tensor)
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        if made and func.overloadpacket not in _EMPTY:
            memory = _memory_of((made, args, kwargs))

            def work() -> None:
                for tensor, value in zip(memory[0], tree_leaves(func(*memory[1], **memory[2])), strict=True):
                    tensor.copy_(value)

            self._device.launch(name, reads=taken, writes=made, effect=work)
        return output


def _memory_of(arguments: Any) -> Any:
    """The arguments with aliases of their tensors, so that the host can free its tensors before the kernel runs."""
    return tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)


@contextmanager
def on_device(host: Host, allocating: Callable[[], None]) -> Iterator[None]:
    """Inside, this thread's tensors are on its device; ``allocating`` is called before messages allocate memory."""
    with _AsIfOnDevice(host, allocating), _Kernels(host.device):
        yield


class FakeEvent:
    """torch.cuda.Event"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._record: Record | None = None

    def record(self, stream: "FakeStream | None" = None) -> None:
        self._record = _stream(stream).record("an event")

    def query(self) -> bool:
        host = current()
        host.spend()
        if self._record is None or not self._record.done:
            return self._record is None
        host.device.known |= self._record.past
        return True

    def synchronize(self) -> None:
        if self._record is not None:
            current().synchronize(self._record)

    def wait(self, stream: "FakeStream | None" = None) -> None:
        if self._record is not None:
            _stream(stream).wait_for(self._record)


class FakeStream:
    """torch.cuda.Stream"""

    def __init__(self, stream: Stream) -> None:
        self.own = stream

    def synchronize(self) -> None:
        current().synchronize(self.own.record("all before synchronize()"))

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)


def _stream(stream: FakeStream | None) -> Stream:
    return current().device.current if stream is None else stream.own


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Replaces the functions of torch.cuda that the runtime uses by those of the calling host's simulated device."""
    with (
        patch("torch.cuda.Event", FakeEvent),
        patch("torch.cuda.current_stream", lambda device=None: FakeStream(current().device.current)),
        patch("torch.cuda.synchronize", lambda device=None: current().synchronize()),
    ):
        yield
