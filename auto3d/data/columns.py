"""Columns of a table as numpy arrays, checked for shape and type."""

from typing import TYPE_CHECKING

import numpy as np

from auto3d.data.field import InputField
from auto3d.data.interface import IGNORED, DataError

if TYPE_CHECKING:
    import pyarrow as pa


def values_of(array: "pa.Array", field: InputField, *, column: str, first: int) -> np.ndarray:
    """The values of a column in consecutive rows, of which the first has the number ``first``: [rows, *shape].

    Raises DataError for a value that is missing, or has another shape or type than ``field`` says.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    rows, inside, kind = len(array), 1, array.type
    if isinstance(kind, pa.ExtensionType):  # how datasets stores its Array2D to Array5D
        array = array.storage
    for axis, size in enumerate(field.shape):
        _check_present(array, column, first, inside)
        if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or _is_fixed(array.type)):
            raise DataError(f"{_shape_error(column, first, field)}; found values of {axis} dimensions, of type {kind}")
        lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
        if (wrong := np.flatnonzero(lengths != size)).size:
            row = first + int(wrong[0]) // inside
            wrong_length = f"{int(lengths[wrong[0]])} in dimension {axis}"
            raise DataError(f"{_shape_error(column, row, field)}; found {wrong_length}")
        array, inside = array.flatten(), inside * size
    _check_present(array, column, first, inside)
    is_integer, is_floating = pa.types.is_integer(array.type), pa.types.is_floating(array.type)
    fits = {"int64": is_integer, "float32": is_integer or is_floating, "bool": pa.types.is_boolean(array.type)}
    if not fits[field.dtype_name]:
        shape = f" of shape {list(field.shape)}" if field.shape else ""
        raise DataError(f"column {column}: found {kind}; it takes {field.dtype_name}{shape}, as inputs say")
    try:
        flat = array.cast({"int64": pa.int64(), "bool": pa.bool_()}.get(field.dtype_name, pa.float64()))
    except pa.ArrowInvalid as error:
        raise DataError(f"column {column}: {error}") from None
    values = flat.to_numpy(zero_copy_only=False).astype(field.dtype_name)
    return checked(values.reshape(rows, *field.shape), field, column)


def checked(values: np.ndarray, field: InputField, column: str) -> np.ndarray:
    """``values``; raises DataError if they contain IGNORED and are not said to be targets."""
    may_hold = field.dtype_name == "int64" and not field.targets and values.size and values.min() <= IGNORED
    if may_hold and (values == IGNORED).any():
        problem = f"it contains {IGNORED}, which losses do not count"
        raise DataError(f"column {column}: {problem}; say targets: true of its input")
    return values


def _is_fixed(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return bool(pa.types.is_fixed_size_list(kind))


def _check_present(array: "pa.Array", column: str, first: int, inside: int) -> None:
    if array.null_count:
        missing = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(f"column {column}: row {first + missing // inside} has no value")


def _shape_error(column: str, row: int, field: InputField) -> str:
    return f"column {column}: row {row} does not have the shape {list(field.shape)} of its input"
