"""Files that survive a kill, a full disk and a power cut, and the lock of a folder that has one owner."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
import socket
import stat
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from rlplug.errors import ConfigError, RunError

SYNC_S: Final = 5.0
"""Shortest time in seconds between two appends that sync a file of rows."""
_NO_LOCKS: Final = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}  # of a file system


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a path to write ``path``'s new content to; replace ``path`` by it at the end, synced, or not at all.

    Its name is random, so that nobody has left a link there, and a link at ``path`` is replaced itself.

    Raises:
        RunError: The file cannot be written. What was at ``path`` is still there.
    """
    partial = path.with_name(f".{path.name}.{os.urandom(8).hex()}.partial")
    with explained(path):
        try:
            os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
            yield partial
            sync(partial)
            partial.replace(path)
            sync(path.parent)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise


def write_file(path: Path, text: str, is_private: bool = False) -> None:
    """Replace ``path`` by a file with ``text``, as :func:`replaced` does; a private one is for its owner alone."""
    with replaced(path) as partial:
        if is_private:
            partial.chmod(0o600)
        partial.write_text(text, encoding="utf-8", newline="", errors="backslashreplace")


def own_file(path: str, flags: int) -> int:
    """Open a regular file that is no link, for ``open(..., opener=own_file)``; ``OSError`` for anything else."""
    if os.path.islink(path):
        raise OSError(errno.ELOOP, "it is a link, and a run's own files are none")
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file")
    return descriptor


def own_bytes(path: Path, most: int = 1 << 24) -> bytes:
    """Return what is in a run's own file; ``OSError`` where :func:`own_file` has one, ``ValueError`` past ``most``."""
    with open(path, "rb", opener=own_file) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return data


@contextmanager
def of_user(path: Path) -> Iterator[None]:
    """Give a file that a library writes the mode that the user's umask asks for: safetensors lets nobody else read."""
    path.touch()
    mode = path.stat().st_mode & 0o777
    yield
    path.chmod(mode)


class RowFile:
    """File to which rows are appended, whole or not at all.

    A row survives a kill of the process at once, and a power cut when the file is synced: by an append once in
    ``SYNC_S`` seconds, because a sync takes milliseconds, and by :meth:`sync`, before what needs the rows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_synced = True
        self._synced_s = -math.inf

    def append(self, rows: str | bytes) -> None:
        """Add ``rows`` at the end; or nothing of them, and raise ``RunError``."""
        with explained(self.path), open(self.path, "ab", buffering=0, opener=own_file) as file:
            before = file.tell()
            data = rows if isinstance(rows, bytes) else rows.encode("utf-8", errors="backslashreplace")
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file.fileno(), before)
                raise
        self._is_synced = False
        if time.monotonic() - self._synced_s >= SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Wait until all rows are on the disk; raise ``RunError`` where the file cannot be written."""
        if not self._is_synced:
            with explained(self.path), suppress(FileNotFoundError):  # somebody removed it
                sync(self.path)
            self._is_synced, self._synced_s = True, time.monotonic()


def replace_folder(partial: Path, folder: Path) -> None:
    """Sync the files of ``partial`` and give it the name ``folder``, in place of the folder that has it.

    Raises:
        RunError: A file cannot be written, or the folder not renamed.
    """
    with explained(folder):
        for path in [*partial.rglob("*"), partial]:
            sync(path)
        former = folder.with_name(folder.name + ".former")
        remove(former)  # of a kill at this place
        if folder.exists() or folder.is_symlink():
            folder.replace(former)
        partial.replace(folder)
        sync(folder.parent)
        remove(former)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, unless there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def require_readable(paths: Iterable[Path]) -> None:
    """Raise ``RunError`` for a path at which there is something other than a regular file that can be read."""
    for path in filter(os.path.lexists, paths):
        with explained(path, "read"):
            open(path, "rb", opener=own_file).close()


def require_no_file(folder: Path, key: str) -> None:
    """Raise ``ConfigError`` for a folder, of the key or option ``key``, whose place, or a parent's, a file takes."""
    for place in (folder, *folder.parents):
        if os.path.exists(place) and not place.is_dir():
            raise ConfigError(f"{key} is {str(folder)!r}, and {place} is a file: give a folder.")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explained(path: Path, doing: str = "written") -> Iterator[None]:
    """Turn an ``OSError`` into one message that names ``path`` and the free space."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} cannot be {doing}: {reason(error)}{_free_space(path)}.") from error


def reason(error: BaseException) -> str:
    """Return what an error says, on one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = text.strip().splitlines()
    return lines[-1].strip().rstrip(".") if lines else type(error).__name__


def _free_space(path: Path) -> str:
    with suppress(OSError):
        return f" ({shutil.disk_usage(path.parent).free / (1 << 30):.1f} GiB are free)"
    return ""


# ---- rows of append-only files ------------------------------------------------------------------------------------


def whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file, without lines that are torn; nothing where there is no file."""
    if path.exists():
        with open(path, "rb", opener=own_file) as file:
            while (line := file.readline(1 << 26)).endswith(b"\n"):
                yield from filter(None, [whole_record(line)])


def whole_record(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line, or ``None`` for one that is torn."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


# ---- one owner ----------------------------------------------------------------------------------------------------


class FolderLock:
    """Lock of a run folder, which one process holds until it closes it or ends, however it ends.

    The lock is one of ``fcntl.lockf``: it works on NFS, and child processes do not keep it, as they would ``flock``'s.
    A file system without locks is warned about.

    Args:
        folder: Folder to lock; it has the file ``run.lock`` then.

    Raises:
        RunError: Another process holds it, or the file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "run.lock"
        with explained(path):
            self._descriptor: int | None = own_file(str(path), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            self.close()
            if error.errno not in _NO_LOCKS:
                raise RunError(
                    f"{folder} belongs to a run that is still going on ({owner!r}): wait for its end, or stop it. To "
                    "start another run, leave --resume and --ckpt_path out."
                ) from error
            warnings.warn(f"{folder}: this file system has no locks: do not start this run twice.", stacklevel=2)
        else:
            with explained(path):
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def close(self) -> None:
        """Let another process have the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def new_numbered_folder(parent: Path) -> Path:
    """Make the folder ``parent/001``, or the next number that is free, which no other process gets, or ``RunError``."""
    with explained(parent / "001"):
        parent.mkdir(parents=True, exist_ok=True)
        taken = [int(path.name) for path in parent.iterdir() if path.name.isascii() and path.name.isdigit()]
        number = max(taken, default=0) + 1
        while True:
            folder = parent / f"{number:03d}"
            try:
                folder.mkdir()
            except FileExistsError:
                number += 1
                continue
            sync(parent)
            return folder
