"""Rows that a checkpoint keeps, and that a resumed run writes again where their file has lost them."""

from __future__ import annotations

import gzip
from pathlib import Path
from unittest import mock

from rlplug.distributed.checkpoints.resumed_files import restore_lines
from rlplug.recording.provenance import KeptRows


def lines(*numbers: int) -> bytes:
    return b"".join(b'{"step": %d}\n' % number for number in numbers)


def test_a_checkpoint_keeps_all_rows_and_compresses_the_new_ones_alone(tmp_path: Path) -> None:
    """Alone catches a checkpoint that compresses the whole log again, or that an emptied log costs its former rows."""
    path, rows = tmp_path / "metrics.jsonl", KeptRows()
    path.write_bytes(lines(1, 2))
    rows.of([path, tmp_path / "absent"])
    with path.open("ab") as file:
        file.write(lines(3))
    with mock.patch("rlplug.recording.provenance.gzip.compress", wraps=gzip.compress) as compress:
        rows.of([path])
    assert compress.call_args.args[0] == lines(3)

    path.write_bytes(lines(4))
    kept = rows.of([path])
    assert list(kept) == ["metrics.jsonl"]
    path.write_bytes(lines(2))
    (said,) = restore_lines(path, kept["metrics.jsonl"].numpy().tobytes())
    assert "3 rows that were lost" in said
    assert path.read_bytes() == lines(1, 2, 3, 4)
