"""Fingerprints of samples as a dataset gives them, before a collator draws anything for them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64

from auto3d.data.fingerprint import BITS

_PLAIN = (int, float, complex, bool, str, bytes, type(None))


class _UnknownError(TypeError):
    """A value whose content is not known to be the same wherever it is the same object."""


def item_fingerprints(items: Sequence[Any]) -> np.ndarray | None:
    """A fingerprint of each of ``items``: [items], of BITS bits in uint64.

    None if one holds something else than numbers, texts, arrays, images, and mappings, sequences and objects of these.
    """
    try:
        return np.array([_of(item) for item in items], dtype=np.uint64) >> np.uint64(64 - BITS)
    except (_UnknownError, RecursionError):
        return None


def _of(item: Any) -> int:
    made = xxh3_64()
    _add(made, item)
    return made.intdigest()


def _add(made: xxh3_64, value: Any) -> None:
    if type(value) in _PLAIN:
        made.update(repr(value).encode())
    elif isinstance(value, torch.Tensor):
        made.update(f"{value.dtype} {list(value.shape)}".encode())
        made.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        made.update(f"{value.dtype.str} {list(value.shape)}".encode())
        made.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        made.update(f"{len(value)} entries".encode())
        for name, entry in value.items():
            _add(made, name)
            _add(made, entry)
    elif isinstance(value, list | tuple):
        made.update(f"{len(value)} values".encode())
        if all(type(entry) in _PLAIN for entry in value):
            made.update(repr(value).encode())
        else:
            for entry in value:
                _add(made, entry)
    elif all(hasattr(value, name) for name in ("mode", "size", "tobytes")):  # an image of PIL
        made.update(f"{value.mode} {value.size}".encode())
        made.update(value.tobytes())
    elif getattr(value, "__dict__", None) and type(value).__reduce_ex__ is object.__reduce_ex__:
        made.update(type(value).__qualname__.encode())
        _add(made, vars(value))
    else:
        raise _UnknownError(type(value).__name__)
