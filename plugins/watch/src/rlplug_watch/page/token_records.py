"""Reads records of the token log, which another program may have torn: everything that they hold is checked."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from rlplug.distributed.durable_files import reason
from rlplug.errors import RunError
from rlplug_watch.token_log.files import HEADER, Record, checksum, scan, token_files
from rlplug_watch.token_log.step_tokens import ALWAYS, COLUMNS, LARGEST, LOSS, ROW, Array, StepTokens, dtype_of


def read_record(record: Record) -> StepTokens:
    """Return the tokens of a step.

    Raises:
        RunError: The file cannot be read, or the record is damaged.
    """
    where = f"{record.path}: step {record.step}"
    try:
        with record.path.open("rb") as file:
            file.seek(record.start + HEADER.size)
            data = file.read(record.size)
        if checksum(record.step, data, record.num_bytes) != record.checksum:
            raise ValueError("its checksum is not that of its bytes")
        return decode(record.step, data, record.num_bytes)
    except OSError as error:
        raise RunError(f"{where} cannot be read: {reason(error)}.") from error
    except ValueError as error:
        raise RunError(f"{where} is damaged: {error}.") from error


def all_records(folder: Path) -> Iterator[Record]:
    """Yield the whole records of a token log, oldest file first.

    Raises:
        OSError: A file cannot be read.
    """
    for path in token_files(folder):
        yield from scan(path)[0]


def decode(step: int, data: bytes, num_bytes: int) -> StepTokens:
    """Return the tokens that :func:`~rlplug_watch.token_log.step_tokens.encode` gave ``data`` of.

    Args:
        step: Number of the step.
        data: The compressed bytes.
        num_bytes: How many they were before.

    Raises:
        ValueError: They are something else; the message says what.
    """
    if not 0 < num_bytes <= LARGEST:
        raise ValueError(f"it says that it has {num_bytes} bytes, and a step has at most {LARGEST}")
    try:
        inflater = zlib.decompressobj()
        raw = inflater.decompress(data, num_bytes)
        if len(raw) != num_bytes or inflater.decompress(inflater.unconsumed_tail, 1):
            raise ValueError(f"it has other than {num_bytes} bytes")
        arrays = load(raw)
    except (zlib.error, SafetensorError, KeyError, OverflowError) as error:
        raise ValueError(f"it is no safetensors file ({type(error).__name__}: {error})") from error
    rows = _rows(arrays)
    columns = _columns(arrays, int(rows["num_tokens"].sum(dtype=np.int64)))
    return StepTokens(step, rows, columns, _pieces(arrays))


def _array(arrays: Mapping[str, Array], name: str, dtype: Any, size: int | None = None) -> Array:
    found = arrays.get(name)
    if found is None:
        raise ValueError(f"it has no {name}")
    if found.dtype != dtype or found.ndim != 1 or (size is not None and len(found) != size):
        wanted = f"{np.dtype(dtype)} [{'n' if size is None else size}]"
        raise ValueError(f"{name} is {found.dtype} {list(found.shape)}, not {wanted}")
    return found


def _rows(arrays: Mapping[str, Array]) -> NDArray[Any]:
    names = ROW.names or ()
    size = len(_array(arrays, f"row/{names[0]}", np.int32))
    rows = np.zeros(size, ROW)
    for name in names:
        rows[name] = _array(arrays, f"row/{name}", np.int32, size)
        if size and rows[name].min() < 0:
            raise ValueError(f"row/{name} has {rows[name].min()}")
    return rows


def _columns(arrays: Mapping[str, Array], size: int) -> dict[str, Array]:
    names = [name.removeprefix("token/") for name in arrays if name.startswith("token/")]
    known = [name for name in names if name in COLUMNS or name.startswith(LOSS)]  # others are a later version's
    return {name: _array(arrays, f"token/{name}", dtype_of(name), size) for name in sorted({*known, *ALWAYS})}


def _pieces(arrays: Mapping[str, Array]) -> dict[int, bytes]:
    ids = _array(arrays, "piece/ids", np.int32)
    lengths = _array(arrays, "piece/lengths", np.int32, len(ids))
    text = _array(arrays, "piece/bytes", np.uint8).tobytes()
    if lengths.sum(dtype=np.int64) != len(text) or (len(lengths) and lengths.min() < 0):
        raise ValueError("piece/lengths do not add up to piece/bytes")
    ends = np.concatenate([[0], lengths.cumsum()]).tolist()
    return {int(token_id): text[ends[i] : ends[i + 1]] for i, token_id in enumerate(ids.tolist())}
