"""Files that a tool call sees, where that is Python alone; for ``sandbox_process.py``.

It uses the standard library alone, since it is part of that script. With namespaces of its own a call gets a root
folder of its own. Without them Landlock (landlock(7), Linux 5.13) refuses all other files, though not to learn the size
of one whose name is known; from Linux 6.12 on it also refuses signals to processes outside the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

BIND_TREE, PRIVATE_TREE, NOSUID, NODEV, DETACH = 0x1000 | 0x4000, 0x4000 | 0x40000, 2, 4, 2
MOUNT_SETATTR, THIS_FOLDER, RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SHARED_MEMORY = "/dev/shm"

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
RIGHTS_OF_VERSION = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of the rights to files that each version of Landlock knows; later versions know those of the last."""
EXECUTE, WRITE_FILE, READ_FILE, READ_FOLDER, TRUNCATE = 1, 2, 4, 8, 1 << 14
SCOPES_VERSION, ALL_SCOPES = 6, 3

DEVICES = tuple(filter(os.path.exists, ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")))
OF_SYSTEM = (
    *("/bin", "/usr/bin", "/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib"),
    *("/nix/store", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"),
)
OF_PREFIX = ("bin", "lib", "lib64", "pyvenv.cfg")

LIBC = ctypes.CDLL(None, use_errno=True)


def visible_paths(folders: Sequence[str]) -> list[str]:
    """Return the folders and files that a call may read, which takes longer than a call: to be called before.

    Args:
        folders: Those beside what Python needs and what this process has imported.
    """
    return _existing([*_python_paths(), *_imported_paths(), *folders])


def _python_paths() -> list[str]:
    """Return the folders and files that Python and its packages need, and no more of the folders they are in."""
    prefixes = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    found = [os.path.join(prefix, name) for prefix in prefixes for name in OF_PREFIX]
    found += [*OF_SYSTEM, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))]
    found += [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    found += [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if os.path.isabs(path)]
    link = sys.executable  # a chain of links, such as of a virtual environment
    while os.path.islink(link):
        link = os.path.join(os.path.dirname(link), os.readlink(link))
        found.append(os.path.dirname(link))
    return found


def _imported_paths() -> list[str]:
    """Return the folders of the packages that are imported, and the files of other modules, which may be anywhere."""
    found = [(module, getattr(module, "__file__", None)) for name, module in sys.modules.items() if "." not in name]
    return [os.path.dirname(file) if hasattr(module, "__path__") else file for module, file in found if file]


def _existing(paths: Iterable[str]) -> list[str]:
    """Return the paths that exist, by all their names, without those within another; outer ones first."""
    named = {os.path.normpath(path) for path in paths if os.path.exists(path)}
    kept: list[str] = []
    for path in sorted(named | {os.path.realpath(path) for path in named}):
        if path != "/" and not any(path.startswith(f"{outer}/") for outer in kept):
            kept.append(path)
    return kept


# ---- with namespaces ------------------------------------------------------------------------------------------------


def enter_own_root(paths: Sequence[str], options: bytes) -> None:
    """Change to a root folder with ``paths``, read-only, ``/proc``, and a ``/dev/shm`` to write to.

    ``/dev/shm`` is the working folder then, and ``/tmp`` another name of it. This process is the first of its
    namespaces, and alone in its mount namespace.

    Args:
        paths: Of :func:`visible_paths`.
        options: Of ``/dev/shm``.

    Raises:
        OSError: A mount was refused.
    """
    os.umask(0o022)  # the user of the call must reach Python
    _mount(None, "/", None, PRIVATE_TREE, None)
    machine = os.uname().machine
    if machine not in PIVOT_ROOT:
        raise OSError(f"pivot_root: unknown on {machine}")
    # by descriptors, since the new root hides what is below its place
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in [*paths, *DEVICES]}
    place = SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else tempfile.gettempdir()
    _mount(b"none", place, b"tmpfs", NOSUID | NODEV, b"size=4m,mode=755")
    os.chdir(place)
    for path, source in sources.items():
        target = path.lstrip("/")
        if os.path.isdir(f"/proc/self/fd/{source}"):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT, 0o600))
        _mount(f"/proc/self/fd/{source}".encode(), target, None, BIND_TREE, None)
        os.close(source)
    os.makedirs("proc", exist_ok=True)
    with contextlib.suppress(OSError):  # refused in some containers: the call does without
        _mount(b"proc", "proc", b"proc", NOSUID | NODEV, None)
    os.makedirs("dev/shm", exist_ok=True)
    with contextlib.suppress(FileExistsError):  # Python or one of ``paths`` is below /tmp
        os.symlink("dev/shm", "tmp")
    _check(LIBC.syscall(PIVOT_ROOT[machine], b".", b"."), "pivot_root")
    _check(LIBC.umount2(b".", DETACH), "umount /")
    make_read_only("/")
    _mount(b"none", SHARED_MEMORY, b"tmpfs", NOSUID | NODEV, options)
    os.chdir(SHARED_MEMORY)


def make_read_only(place: str) -> None:
    """Make a mount and all below it read-only.

    Raises:
        OSError: The kernel is older than Linux 5.12, or refuses.
    """
    attributes = struct.pack("QQQQ", READ_ONLY, 0, 0, 0)
    call = (MOUNT_SETATTR, THIS_FOLDER, place.encode(), RECURSIVE, attributes, ctypes.c_size_t(len(attributes)))
    _check(LIBC.syscall(*call), f"mount_setattr {place}")


def _mount(source: bytes | None, target: str, kind: bytes | None, flags: int, options: bytes | None) -> None:
    _check(LIBC.mount(source, target.encode(), kind, flags, options), f"mount {target}")


# ---- without ----------------------------------------------------------------------------------------------------


def refuse_other_files(paths: Sequence[str]) -> None:
    """Refuse this process and its children all files but ``paths``, of :func:`visible_paths`, for good, with Landlock.

    Nothing can be written then but devices such as ``/dev/null``. The process must not be able to gain rights.

    Raises:
        OSError: The kernel has no Landlock.
    """
    version = LIBC.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    _check(min(version, 0), "Landlock")
    rights = (1 << RIGHTS_OF_VERSION[min(version, max(RIGHTS_OF_VERSION))]) - 1
    scopes = ALL_SCOPES if version >= SCOPES_VERSION else 0
    attributes = struct.pack("QQQ", rights, 0, scopes)[: 24 if scopes else 8]
    rules = LIBC.syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    _check(min(rules, 0), "landlock_create_ruleset")
    try:
        for path in paths:
            _allow(rules, path, rights & (EXECUTE | READ_FILE | READ_FOLDER))
        for path in DEVICES:
            _allow(rules, path, rights & (READ_FILE | WRITE_FILE | TRUNCATE))
        _check(LIBC.syscall(LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    finally:
        os.close(rules)
    os.chdir("/")


def _allow(rules: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        kept = rights if os.path.isdir(path) else rights & ~READ_FOLDER
        _check(LIBC.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", kept, place), 0), f"landlock_add_rule {path}")
    finally:
        os.close(place)


# ---- what stands ----------------------------------------------------------------------------------------------------


def can_be_read(path: str) -> bool:
    """Return whether this process can read a file."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def try_walls(trainer: int, bait: str) -> list[str]:
    """Return which walls a call has, out of those that it tries itself: ``trainer``, ``files``, ``network``.

    Whether it can write, whoever owns ``bait`` sees by the file ``written`` in it.

    Args:
        trainer: Process that no call may reach.
        bait: Folder outside the call where every user may read the file ``secret``, and write.
    """
    found = []
    sees_others = os.getpid() != 1  # the first process of its namespace sees its own alone
    if not sees_others or not (_can_signal(trainer) or can_be_read(f"/proc/{trainer}/environ")):
        found.append("trainer")
    if not any(map(can_be_read, (os.path.join(bait, "secret"), "/etc/passwd"))):
        found.append("files")
    with contextlib.suppress(OSError):
        os.close(os.open(os.path.join(bait, "written"), os.O_WRONLY | os.O_CREAT, 0o600))
    if not _is_possible(socket.socket):
        found.append("network")
    return found


def _can_signal(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


def _is_possible(make: Callable[[], Any]) -> bool:
    try:
        make()
    except OSError:
        return False
    return True


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
