"""The initial weights of one stage, equal to those that the whole model would get, without holding the whole model.

The module is built for real, so its own initialisation draws the same random numbers in the same order as on one
process; but a parameter of another stage gives its memory back as soon as the next tensor is written. Beyond its own
weights a rank holds one foreign tensor at a time.
"""

import ctypes
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from auto3d.errors import InputError

_C_LIBRARY = ctypes.CDLL(None)
_TRIM_BYTES = 2**20


class InitialStateError(InputError):
    """Initial weights that cannot be made, or a state dict that does not fit the model."""


def materialize(
    build: Callable[[], nn.Module],
    names: Collection[str],
    *,
    seed: int,
    state: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """The parameters and buffers called ``names`` of the module that ``build`` makes, on the CPU.

    They equal those of ``torch.manual_seed(seed); build()`` or, where given, the entries of ``state``, which is read
    entry by entry. Raises InitialStateError if ``state`` lacks an entry or has another shape.
    """
    own_by_order = _registered(build, names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with _ForeignStorage() as foreign, _on_registration(foreign.owned_or_foreign(own_by_order)):
            model = build()
        foreign.release_all()
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    own = {name: tensors[name].detach() for name in names}
    for name, tensor in own.items():
        if state is not None and name in state:
            if state[name].shape != tensor.shape:
                raise InitialStateError(
                    f"state dict: {name} has shape {list(state[name].shape)}, the model's has {list(tensor.shape)}"
                )
            tensor.copy_(state[name])
        elif state is not None and name in dict(model.named_parameters()):
            raise InitialStateError(f"state dict: {name} is missing")
        if tensor.untyped_storage().nbytes() < tensor.nbytes:
            raise InitialStateError(f"{name}: the module registers its parameters in another order on the meta device")
    return own


def _registered(build: Callable[[], nn.Module], names: Collection[str]) -> list[bool]:
    """Whether the k-th parameter that the module registers while it is built ends as one of ``names``."""
    order: list[nn.Parameter] = []
    with torch.device("meta"), _on_registration(order.append):
        model = build()
    own = {id(parameter) for name, parameter in model.named_parameters() if name in names}
    return [id(parameter) in own for parameter in order]


@contextmanager
def _on_registration(call: Callable[[nn.Parameter], None]) -> Iterator[None]:
    handle = register_module_parameter_registration_hook(
        lambda module, name, parameter: call(parameter) if parameter is not None else None
    )
    try:
        yield
    finally:
        handle.remove()


class _ForeignStorage(TorchDispatchMode):
    """Gives foreign parameters memory only while they are being written."""

    def __init__(self) -> None:
        super().__init__()
        self._foreign: dict[
            int, tuple[torch.UntypedStorage, int]
        ] = {}  # with its bytes; held, so that no key is reused
        self._resident: set[int] = set()  # keys of those that have memory now

    def owned_or_foreign(self, own: list[bool]) -> Callable[[nn.Parameter], None]:
        order = iter(own)

        def register(parameter: nn.Parameter) -> None:
            storage = parameter.untyped_storage()
            if not next(order, False) and storage._cdata not in self._foreign:
                self._foreign[storage._cdata] = (storage, storage.nbytes())
                self._resident.add(storage._cdata)

        return register

    def release_all(self) -> None:
        self._release(set(self._resident))

    def _release(self, keys: set[int]) -> None:
        if not keys:
            return
        for key in keys:
            self._foreign[key][0].resize_(0)
        self._resident -= keys
        if max(self._foreign[key][1] for key in keys) > _TRIM_BYTES and hasattr(_C_LIBRARY, "malloc_trim"):
            _C_LIBRARY.malloc_trim(0)  # else glibc keeps what is freed, and the process grows to the whole model

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        keys = [tensor.untyped_storage()._cdata for tensor in tensors]
        touched = self._foreign.keys() & set(keys)
        self._release(self._resident - touched)
        written = keys[0] if keys and func._schema.is_mutable else None
        is_view = written is None and any(result.alias_info is not None for result in func._schema.returns)
        for key in touched - self._resident:
            if key != written and not is_view:
                raise InitialStateError(
                    f"the module computes one initial weight from another ({func}), which one stage alone cannot do; "
                    "give a state dict"
                )
            storage, size = self._foreign[key]
            storage.resize_(size)
            self._resident.add(key)
        return func(*args, **(kwargs or {}))
