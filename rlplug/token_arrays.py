"""Arrays with an entry for each token: their dtypes, how sequences become them, and records that hold them.

A step has millions of tokens. As Python objects they would take some 70 bytes each, and be copied one by one.
"""

from __future__ import annotations

import dataclasses
from array import array
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

TokenIds: TypeAlias = NDArray[np.int32]
"""int32 [n], read-only."""
TokenMask: TypeAlias = NDArray[np.bool_]
"""bool [n], read-only."""
TokenFloats: TypeAlias = NDArray[np.float32]
"""float32 [n], read-only."""

_KINDS = {np.dtype(np.int32): "iu", np.dtype(np.bool_): "b", np.dtype(np.float32): "fiu"}
"""NumPy's letters of the dtypes whose values may become each dtype."""
_PYTHON_NUMBERS = {np.dtype(np.int32): "i", np.dtype(np.float32): "d"}
"""Type codes of Python's ``array`` for values that become each dtype; of integers it takes no floats."""
_INT32 = np.iinfo(np.int32)


def as_tokens(values: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """Return values of tokens as a read-only array of one dimension: the same object where they are one already.

    Memory that others may still write is copied.

    Args:
        values: An array or a sequence of numbers.
        dtype: ``numpy.int32``, ``numpy.bool_`` or ``numpy.float32``.

    Raises:
        ValueError: They are not of one dimension, of another kind than ``dtype``, or beyond int32.
    """
    wanted = np.dtype(dtype)
    try:
        found = _of_numbers(values, wanted)
    except (ValueError, OverflowError) as problem:  # lists of different lengths
        raise ValueError(f"not one list of numbers: {problem}") from None
    if found.ndim != 1 or (found.size and found.dtype.kind not in _KINDS[wanted]):
        raise ValueError(f"{found.ndim} dimensions of {found.dtype}, not 1 of {wanted}")
    if found.dtype != wanted:
        if wanted == np.int32 and found.size and not (_INT32.min <= found.min() and found.max() <= _INT32.max):
            raise ValueError(f"{found.min()} to {found.max()} are beyond int32")
        with np.errstate(over="ignore"):  # of a logprob, which a check finds
            found = found.astype(wanted)
    is_theirs = found is values or not found.flags.owndata
    return read_only(found.copy() if is_theirs and found.flags.writeable else found)


def _of_numbers(values: Any, wanted: np.dtype[Any]) -> NDArray[Any]:
    """Return values as an array. Lists of Python numbers take half the time of ``numpy.asarray``."""
    code = _PYTHON_NUMBERS.get(wanted)
    if isinstance(values, list | tuple) and values and type(values[0]) in (int, float) and code is not None:
        with suppress(TypeError, OverflowError):  # others are among them, or are too large
            return np.frombuffer(array(code, values), dtype=np.dtype(code))
    return np.asarray(values)


def joined(*parts: NDArray[Any]) -> NDArray[Any]:
    """Return the concatenation of arrays, read-only."""
    return read_only(np.concatenate(parts))


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array, or a view of one that may be written, through which nothing can be written."""
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


class TokenRecord:
    """Base class of dataclasses with arrays as fields.

    Two are equal when all fields are: arrays by dtype, shape and values, a NaN and a NaN included. They have no hash.
    Copies and what is unpickled have read-only arrays too.
    """

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return all(_equal(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            self.__dict__[name] = read_only(value) if isinstance(value, np.ndarray) else value

    def convert(self, **dtypes: type[np.generic]) -> None:
        """Make the named fields arrays.

        Raises:
            ValueError: A field cannot become one; the message names it.
        """
        for name, dtype in dtypes.items():
            try:
                array = as_tokens(getattr(self, name), dtype)
            except ValueError as problem:
                raise ValueError(f"{type(self).__name__}.{name} has {problem}.") from None
            object.__setattr__(self, name, array)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        same_kind = one.dtype == other.dtype and one.shape == other.shape
        return same_kind and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return bool(one == other)
