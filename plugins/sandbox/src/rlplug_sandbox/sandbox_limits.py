"""Limits of a tool call's process, and the end of the processes that it leaves; for ``sandbox_process.py``.

It uses the standard library alone, since it is part of that script. As a script of its own it ends all processes of a
user.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import sys

FIRST_USER = 2_000_000_000
"""First user id of workers, from which on no user exists (by systemd's table); a worker's own is this plus its pid."""

PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 8, 36, 38, 47
PR_CAP_AMBIENT_RAISE = 2
CAP_DAC_READ_SEARCH = 2
CAPABILITY_VERSION = 0x20080522
LIBC = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Make this process the parent of all orphaned descendants."""
    check(LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; a later change of user undoes it."""
    check(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def keep_rights() -> None:
    """Keep this process from gaining rights, such as through ``sudo``."""
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def own_user(worker: int) -> int | None:
    """Return a user id for the calls of the worker with this pid, or ``None`` if they keep the trainer's user.

    The kernel does not limit the number of root's processes, so as root a call changes to a user of its own. Root in a
    user namespace without such ids is not root to the kernel, which limits it as any user.
    """
    user = FIRST_USER + worker
    if os.geteuid() != 0 or not all(is_mapped(user, kind) for kind in ("uid", "gid")):
        return None
    return user


def end_user(user: int) -> None:
    """Become a user, and kill all its processes at once, so that none can escape by forking."""
    become(user)
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:  # the user has no processes
        return


def is_mapped(number: int, kind: str) -> bool:
    """Return whether this user namespace has the user (``uid``) or group (``gid``)."""
    with open(f"/proc/self/{kind}_map") as file:
        ranges = [line.split() for line in file]
    return any(int(first) <= number < int(first) + int(count) for first, _, count in ranges)


def become(user: int, may_read: bool = True) -> None:
    """Change to another user for good, keeping only root's right to read, if this process has it and ``may_read``.

    Without that right, a call could import nothing below ``/root``, where Python's own modules may be.
    """
    check(LIBC.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0))
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    may_read = may_read and set_capabilities(1 << CAP_DAC_READ_SEARCH)
    if not may_read and not set_capabilities(0):
        raise PermissionError("the rights of root could not be dropped")
    if may_read:  # also in programs that the call starts
        check(LIBC.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH, 0, 0))


def set_capabilities(mask: int) -> bool:
    """Drop all capabilities but these; return false if the process lacks one of them."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    data = (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0)
    return bool(LIBC.capset(header, data) == 0)


def check(result: int) -> None:
    """Raise the last error of the C library if ``result`` is not 0."""
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def limit(kind: int, value: int) -> None:
    """Lower a limit of this process for good."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def kill(pid: int) -> None:
    """Kill a process if it exists."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def processes() -> dict[int, tuple[int, int]]:
    """Return the parent and the number of threads of every visible process."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:  # the process has ended
                continue
            found[int(name)] = int(fields[1]), int(fields[17])
    return found


def descendants() -> list[int]:
    """Return the pids of all descendants of this process."""
    parents = {pid: parent for pid, (parent, _) in processes().items()}
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def bytes_below(own_bytes: int) -> int:
    """Return the memory of all descendants of this process, each without ``own_bytes``, which a fork shares."""
    found = children(os.getpid()) if os.path.exists("/proc/thread-self/children") else descendants()
    for pid in found:
        found += children(pid)
    return sum(max(0, private_bytes(pid) - own_bytes) for pid in found)


def children(pid: int) -> list[int]:
    """Return the pids of a process's children, of all its threads, without a look at the host's other processes."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def private_bytes(pid: int) -> int:
    """Return the memory of a process that is no file's and no other's, but for what a fork shares; 0 at its end."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except OSError:
        return 0
    return (resident - shared) * resource.getpagesize()


def num_tasks_of(user: int) -> int:
    """Return the number of threads of a user, which the kernel's limit of processes counts."""
    count = 0
    for pid, (_, num_threads) in processes().items():
        try:
            count += num_threads * (os.stat(f"/proc/{pid}").st_uid == user)
        except OSError:  # the process has ended
            continue
    return count


def counts_by_namespace() -> bool:
    """Return whether the kernel counts the processes of each user namespace apart, as it has since version 5.14."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(digit for digit in minor if digit.isdigit()))) >= (5, 14)


def remove_files(user: int, folder: str) -> None:
    """Remove what a user has left in a folder that all may write."""
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            if os.lstat(path).st_uid == user:
                shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)


if __name__ == "__main__":
    end_user(int(sys.argv[1]))
