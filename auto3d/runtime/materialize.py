"""The initial weights of one stage, equal to those that the whole model would get, without holding the whole model.

The module is built for real, so its own initialisation draws the same random numbers in the same order as on one
process; but a parameter of another stage has memory only while an operation works on it. What is then read from it is
not what the model put there: such reads are followed, and refused where they reach a weight of this stage.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from auto3d.capture.empty import build_empty, held_tensors
from auto3d.errors import InputError
from auto3d.runtime.memory import return_freed_memory

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
    entry by entry. Raises InitialStateError if ``state`` lacks a parameter or has another shape, or if a tensor without
    an entry is computed from a parameter of another stage.
    """
    foreign_by_order = _foreign_by_order(build, names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with _ForeignStorage() as foreign, _on_registration(foreign.registration(foreign_by_order)):
            model = build()
        foreign.release_all()
    return_freed_memory()
    parameters = dict(model.named_parameters())
    tensors = {**held_tensors(model), **dict(model.named_buffers()), **parameters}
    own = {name: tensors[name].detach() for name in names}
    for name, tensor in own.items():
        if tensor.untyped_storage().nbytes() < tensor.nbytes:
            raise InitialStateError(f"{name}: the module registers its parameters in another order on the meta device")
        if state is not None and name in state:
            if state[name].shape != tensor.shape:
                raise InitialStateError(
                    f"state dict: {name} has shape {list(state[name].shape)}, the model's has {list(tensor.shape)}"
                )
            tensor.copy_(state[name])
        elif state is not None and name in parameters:
            raise InitialStateError(f"state dict: {name} is missing")
        elif foreign.is_lost(tensor):
            raise InitialStateError(
                f"{name}: the module computes its initial value from a parameter of another stage, "
                "which one stage alone cannot do; give a state dict"
            )
    return own


def _foreign_by_order(build: Callable[[], nn.Module], names: Collection[str]) -> list[bool]:
    """Whether the k-th parameter that the module registers while it is built stays in it, but is not of ``names``."""
    order: list[nn.Parameter] = []
    with _on_registration(order.append):
        model = build_empty(build)
    foreign = {id(parameter) for name, parameter in model.named_parameters() if name not in names}
    return [id(parameter) in foreign for parameter in order]


@contextmanager
def _on_registration(call: Callable[[nn.Parameter], None]) -> Iterator[None]:
    handle = register_module_parameter_registration_hook(
        lambda module, name, parameter: call(parameter) if parameter is not None else None
    )
    try:
        yield
    finally:
        handle.remove()


# Operators that overwrite the whole of what they write to, whatever was there.
_OVERWRITING = frozenset(
    (
        "copy_",
        "fill_",
        "zero_",
        "normal_",
        "uniform_",
        "random_",
        "bernoulli_",
        "exponential_",
        "log_normal_",
        "cauchy_",
    )
)
# Operators whose result depends on the shape of what they read alone.
_OF_SHAPE = frozenset(
    f"{form}{suffix}"
    for form, suffixes in {
        "new_": ("empty", "zeros", "ones", "full", "empty_strided"),
        "": ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    }.items()
    for suffix in suffixes
)


class _ForeignStorage(TorchDispatchMode):
    """Gives foreign parameters memory only while they are worked on, and follows what is then computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self._foreign: dict[int, tuple[torch.UntypedStorage, int]] = {}  # key -> storage and its bytes
        self._resident: set[int] = set()  # keys of foreign storages that have memory now
        # Storages whose content is not the model's; the reference keeps a key from being used again.
        self._lost: dict[int, StorageWeakRef] = {}

    def registration(self, foreign_by_order: list[bool]) -> Callable[[nn.Parameter], None]:
        """To be called with each parameter that is registered, in order."""
        order = iter(foreign_by_order)

        def register(parameter: nn.Parameter) -> None:
            storage = parameter.untyped_storage()
            if next(order, False) and storage._cdata not in self._foreign:
                self._foreign[storage._cdata] = (storage, storage.nbytes())
                self._resident.add(storage._cdata)

        return register

    def release_all(self) -> None:
        self._release(set(self._resident))

    def is_lost(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._lost

    def _release(self, keys: set[int]) -> None:
        if not keys:
            return
        for key in keys:
            storage, _ = self._foreign[key]
            storage.resize_(0)
            self._lose(storage)
        self._resident -= keys
        if max(self._foreign[key][1] for key in keys) > _TRIM_BYTES:
            return_freed_memory()

    def _lose(self, storage: torch.UntypedStorage) -> None:
        self._lost[storage._cdata] = StorageWeakRef(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        touched = self._foreign.keys() & {tensor.untyped_storage()._cdata for tensor in tensors}
        self._release(self._resident - touched)
        for key in touched - self._resident:
            storage, size = self._foreign[key]
            storage.resize_(size)
            self._resident.add(key)
        written = tensors[0] if func._schema.is_mutable and tensors else None
        read = tensors[1:] if written is not None and name in _OVERWRITING else tensors
        from_lost = name not in _OF_SHAPE and any(self.is_lost(tensor) for tensor in read)
        result = func(*args, **kwargs)
        if from_lost:
            for tensor in [written, *tree_leaves(result)]:
                if isinstance(tensor, torch.Tensor):
                    self._lose(tensor.untyped_storage())
        elif name in _OVERWRITING and written.nbytes == written.untyped_storage().nbytes():
            self._lost.pop(written.untyped_storage()._cdata, None)
        return result
