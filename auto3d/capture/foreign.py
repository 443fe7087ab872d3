"""Bounded memory for the parameters of a module while it is built for real, although no process holds all of them.

An initialiser runs many operations on one or a few parameters: it draws until all values fit, multiplies by a norm, or
orthogonalises. So the most recently used parameters keep their memory, up to a limit, and the others lose their memory
and their values. Everything that is computed from lost values is tracked, and refused where it would affect the model's
structure or control flow.

Of a parameter that tensor parallelism splits, the process keeps its shard when the parameter loses its memory. If the
parameter gets memory again, the shard is put back there. It stays right under operations that compute each element by
itself, such as a later scaling.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from auto3d.allocator import return_freed_memory
from auto3d.capture.shard import Shard
from auto3d.errors import InputError

SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # assignment to ``tensor.data``, a C property
_RESIDENT = 2  # foreign parameters of the largest size that keep their memory: an initialiser may use two at once
_TRIM_BYTES = 2**20
_OWN_REFERENCES = 2  # references to a storage that its parameter and this module hold

# Operators that overwrite their whole target, whatever it held.
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
        "geometric_",
        "set_",
    )
)
# Operators whose result depends only on the shape of what they read.
_OF_SHAPE = frozenset(
    f"{form}{suffix}"
    for form, suffixes in {
        "new_": ("empty", "zeros", "ones", "full", "empty_strided"),
        "": ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    }.items()
    for suffix in suffixes
)
_COPYING = frozenset(("_to_copy", "clone", "detach"))  # operators whose result has the elements that they read
# Operators whose result can affect Python code, or whose number of random draws depends on what they read.
_DECIDING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
# Methods that read or expose a tensor's memory without the dispatcher.
_RAW = {
    torch.Tensor.tolist: False,  # method -> whether its result shares the tensor's memory
    torch.Tensor.__repr__: False,
    torch.Tensor.numpy: True,
    torch.Tensor.__array__: True,
    torch.Tensor.__dlpack__: True,
}


class LostValueError(InputError):
    """While a module is built, its code reads a value that this process no longer holds."""


class ForeignWeights(TorchDispatchMode):
    """Gives foreign parameters memory while they are in use, and tracks what is computed from lost values.

    This process will not keep the values of a foreign parameter, such as a parameter of another stage. ``names`` lists,
    for each parameter that the module registers, in order, its name if it is foreign, else None; without ``names``, all
    are foreign. The most recently used foreign parameters keep their memory, up to a total of two parameters of the
    largest size or ``at_least_bytes``, whichever is more. Of the foreign parameters in ``shards``, the process keeps
    that shard (``take_shard``).
    """

    def __init__(
        self,
        names: Sequence[str | None] | None = None,
        *,
        at_least_bytes: int = 0,
        shards: Mapping[str, Shard] | None = None,
    ) -> None:
        super().__init__()
        self.error: LostValueError | None = None  # the first error, since the module's code may have caught it
        self._names = None if names is None else iter(names)
        self._limit_bytes = at_least_bytes
        self._name_of: dict[int, tuple[nn.Parameter, str]] = {}  # id -> foreign parameter and its name
        self._of_storage: dict[int, nn.Parameter] = {}
        self._resident: dict[int, int] = {}  # storage -> its bytes, from least to most recently used
        self._empty: dict[int, int] = {}  # storage without memory -> bytes that it needs
        self._has_grown = False  # resident memory has grown since the limit was last checked
        self._exposed: set[int] = set()  # storages whose memory was exposed to numpy
        # Storage -> name of the parameter whose lost values it depends on; the weak reference keeps the key unique.
        self._lost: dict[int, tuple[StorageWeakRef, str]] = {}
        self._shards = shards or {}
        self._kept: dict[str, torch.Tensor] = {}  # name -> its shard, while the parameter has no memory
        self._right: dict[int, StorageWeakRef] = {}  # lost storages in which this process's shard is right

    @contextmanager
    def following(self) -> Iterator[None]:
        """Track what the code inside computes; raises LostValueError at the end even if the code caught it."""
        try:
            with self, _RawAccess(self):
                yield
        except Exception:
            if self.error is None:
                raise
        if self.error is not None:
            raise self.error

    def register(self, parameter: nn.Parameter, name: str | None) -> None:
        """Record a parameter. Call this for each parameter that the module registers, in order, with its ``name``."""
        if self._names is not None:
            name = next(self._names, None)
        if name is not None and id(parameter) not in self._name_of:
            self._name_of[id(parameter)] = (parameter, name)
            self._limit_bytes = max(self._limit_bytes, _RESIDENT * parameter.nbytes)
            self._hold(parameter)

    def source_of_loss(self, tensor: torch.Tensor) -> str | None:
        """Name of a parameter whose lost values ``tensor`` depends on; None if its values are real."""
        lost = self._lost.get(_storage_key(tensor))
        return None if lost is None else lost[1]

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """The name under which ``parameter`` was registered as foreign, if it was."""
        known = self._name_of.get(id(parameter))
        return None if known is None else known[1]

    def take_shard(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """This process's shard of a foreign ``parameter``, once; None if its values are lost as well."""
        name = self._name_of[id(parameter)][1]
        key = _storage_key(parameter)
        if key in self._empty:
            return self._kept.pop(name, None)
        with torch.no_grad():
            return None if self._is_wrong(key) else self._shards[name].of(parameter)

    def _is_wrong(self, key: int) -> bool:
        """Whether the values in a storage are lost, also the values of this process's shard."""
        return key in self._lost and key not in self._right

    def _keep_shard(self, parameter: nn.Parameter) -> None:
        """Keep this process's shard of ``parameter``, which is about to lose its memory."""
        name = self._name_of[id(parameter)][1]
        if name in self._shards and not self._is_wrong(_storage_key(parameter)):
            with torch.no_grad():
                self._kept[name] = self._shards[name].of(parameter)

    def _put_back(self, key: int) -> None:
        """Write the shard that was kept back into the new memory of its parameter."""
        parameter = self._of_storage[key]
        kept = self._kept.pop(self._name_of[id(parameter)][1], None)
        if kept is not None:
            with torch.no_grad():
                self._shards[self._name_of[id(parameter)][1]].put_back(kept, parameter)
            self._right[key] = StorageWeakRef(parameter.untyped_storage())

    def release_all(self) -> None:
        """Free the memory of all foreign parameters."""
        self._limit_bytes = 0
        self._release(set())

    def storage_changed(self, parameter: torch.Tensor) -> None:
        """Record that ``parameter`` now uses other memory than before."""
        if id(parameter) not in self._name_of:
            return
        for key, known in list(self._of_storage.items()):
            if known is parameter:
                self._forget(key)
        self._hold(self._name_of[id(parameter)][0])

    def gives_raw(self, tensor: torch.Tensor, *, shows_memory: bool) -> None:
        """Record that the memory of ``tensor`` is about to be read or shared without an operator."""
        if (name := self.source_of_loss(tensor)) is not None:
            raise self._refusal(name)
        if shows_memory:
            self._exposed.add(_storage_key(tensor))

    def _hold(self, parameter: nn.Parameter) -> None:
        key = _storage_key(parameter)
        self._of_storage[key] = parameter
        self._resident[key] = parameter.nbytes
        self._has_grown = True

    def _forget(self, key: int) -> None:
        del self._of_storage[key]
        self._resident.pop(key, None)
        self._empty.pop(key, None)

    def _use(self, keys: Iterable[int]) -> None:
        """Give storages memory, and mark them as the most recently used."""
        for key in keys:
            size = self._resident.pop(key, None)
            if size is None:
                size = self._empty.pop(key)
                self._of_storage[key].untyped_storage().resize_(size)
                self._put_back(key)
                self._has_grown = True
            self._resident[key] = size

    def _release(self, used: set[int]) -> None:
        """Free the least recently used storages until the rest is within the limit."""
        self._has_grown = False
        excess = sum(self._resident.values()) - self._limit_bytes
        released = []
        for key, size in list(self._resident.items()):
            if excess <= 0:
                break
            if key not in used and not self._is_shown(key):
                self._empty_storage(key)
                excess -= size
                released.append(size)
        if released and max(released) > _TRIM_BYTES:
            return_freed_memory()

    def _is_shown(self, key: int) -> bool:
        """Whether numpy may still read or write the memory of a storage."""
        if key not in self._exposed:
            return False
        storage = self._of_storage[key].untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata) > _OWN_REFERENCES

    def _empty_storage(self, key: int) -> None:
        parameter = self._of_storage[key]
        self._keep_shard(parameter)
        self._right.pop(key, None)
        if not parameter.untyped_storage().resizable():  # memory that numpy allocated
            self._forget(key)
            with torch._C.DisableTorchFunction():
                parameter.data = torch.empty_like(parameter)
            self._hold(parameter)
            key = _storage_key(parameter)
        storage = parameter.untyped_storage()
        del self._resident[key]
        self._empty[key] = storage.nbytes()
        storage.resize_(0)
        self._lose(parameter, self._name_of[id(parameter)][1])

    def _lose(self, tensor: torch.Tensor, name: str) -> None:
        self._lost[_storage_key(tensor)] = (StorageWeakRef(tensor.untyped_storage()), name)

    def _refusal(self, name: str) -> LostValueError:
        error = LostValueError(
            "initial values must not depend on other parameters, since no process holds the whole model; while the "
            f"model is built, its code reads a value that depends on the parameter {name}"
        )
        self.error = self.error or error
        return error

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        tensors = _tensors((args, kwargs))
        used = self._of_storage.keys() & {_storage_key(tensor) for tensor in tensors}
        self._use(used)
        if self._has_grown:
            self._release(used)
        written = _written(func, args, kwargs)
        overwrites = name in _OVERWRITING or any(argument.is_out for argument in func._schema.arguments)
        skipped = {id(tensor) for tensor in written} if overwrites else set()
        read = [] if name in _OF_SHAPE else [tensor for tensor in tensors if id(tensor) not in skipped]
        source = next(filter(None, map(self.source_of_loss, read)), None)
        if source is not None and self._decides(func, name, args):
            raise self._refusal(source)
        try:
            result = func(*args, **kwargs)
        except (torch.linalg.LinAlgError, IndexError, ValueError) as error:
            if source is None:
                raise
            raise self._refusal(source) from error  # the operator checked values that are not real
        if name == "set_":
            self.storage_changed(args[0])
        if source is not None:
            for tensor in written:
                if not self._keeps_right(func, tensor, read):
                    self._right.pop(_storage_key(tensor), None)
            for tensor in [*written, *_tensors(result)]:
                self._lose(tensor, source)
            known = {_storage_key(tensor) for tensor in tensors}
            for tensor in _tensors(result):
                if (key := _storage_key(tensor)) not in known and self._gives_right(func, name, tensor, read):
                    self._right[key] = StorageWeakRef(tensor.untyped_storage())
        elif overwrites:
            for tensor in written:
                if tensor.nbytes == tensor.untyped_storage().nbytes():
                    self._lost.pop(_storage_key(tensor), None)
                    self._right.pop(_storage_key(tensor), None)
        return result

    def _keeps_right(self, func: Any, target: torch.Tensor, read: Sequence[torch.Tensor]) -> bool:
        """Whether each element that ``func`` writes to ``target`` depends on no lost value but itself."""
        lost = [tensor for tensor in read if self.source_of_loss(tensor) is not None]
        same = all(
            _storage_key(tensor) == _storage_key(target)
            and tensor.storage_offset() == target.storage_offset()
            and (tensor.shape, tensor.stride()) == (target.shape, target.stride())
            for tensor in lost
        )
        return not lost or (same and torch.Tag.pointwise in func.tags)

    def _gives_right(self, func: Any, name: str, result: torch.Tensor, read: Sequence[torch.Tensor]) -> bool:
        """Whether each element of the new tensor ``result`` depends on no lost value but the value in its place.

        This is so where a module is converted to another type: all its parameters are copied.
        """
        lost = [tensor for tensor in read if self.source_of_loss(tensor) is not None]
        in_place = all(
            _storage_key(tensor) in self._right and _is_all_in_order(tensor) and tensor.numel() == result.numel()
            for tensor in lost
        )
        by_element = torch.Tag.pointwise in func.tags or name in _COPYING
        return by_element and in_place and _is_all_in_order(result)

    def _decides(self, func: Any, name: str, args: tuple) -> bool:
        """Whether lost values that ``func`` reads affect more than values: Python code, a shape, a random draw."""
        if name == "index":  # with a mask as index, the shape depends on values
            masks = [t for t in args[1] if t is not None and t.dtype in (torch.bool, torch.uint8)]
            return any(self.source_of_loss(mask) is not None for mask in masks)
        return any(tag in func.tags for tag in _DECIDING)


class _RawAccess(TorchFunctionMode):
    """Reports to a ForeignWeights the accesses that bypass its dispatcher."""

    def __init__(self, foreign: ForeignWeights) -> None:
        super().__init__()
        self._foreign = foreign

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _RAW:
            self._foreign.gives_raw(args[0], shows_memory=_RAW[func])
        result = func(*args, **(kwargs or {}))
        if func == SET_DATA:
            self._foreign.storage_changed(args[0])
        return result


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_all_in_order(tensor: torch.Tensor) -> bool:
    """Whether the tensor has all elements of its memory, in their order."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    if not func._schema.is_mutable:
        return []
    values = [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return _tensors(values)
