"""Isolation of a tool call, beyond its limits: namespaces and a filter of system calls; for ``sandbox_process.py``.

It uses the standard library alone, since it is part of that script. Namespaces give a call a view without other
processes, so that it cannot signal or read them, and a ``/dev/shm`` of its own; root needs CAP_SYS_ADMIN for them, and
another user a kernel that allows user namespaces. The filter works without either.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
from collections.abc import Iterable
from typing import NoReturn, TypeAlias

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS = 0x20000, 0x8000000, 0x10000000, 0x20000000
PRIVATE_TREE = 0x4000 | 0x40000
NOSUID_NODEV = 2 | 4
SHARED_MEMORY = "/dev/shm"

AF_UNIX, SOCK_STREAM = 1, 1
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
REFUSE_AS_UNKNOWN = 0x00050000 | errno.ENOSYS
LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, JUMP_IF_BITS, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Number of an architecture in a filter, and the column of its system calls below."""
X32 = 0x40000000
"""Bit of the second set of system calls on x86_64."""
REFUSED = {
    # memory that no limit of a process counts, and that may outlive it
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # the memory and the files of other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    # the limits, the priority and the memory of other processes of the user, where they are not hidden
    "setpriority": (141, 140),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    # a user namespace, in which a call would be root
    "unshare": (272, 97),
    # other file systems, among them memory without a limit
    "mount": (165, 40),
    "fsopen": (430, 430),
    "open_tree": (428, 428),
    "pivot_root": (155, 41),
    "move_mount": (429, 429),
    "setns": (308, 268),
    "io_uring_setup": (425, 425),
}
"""System calls that no call may make, by their numbers on x86_64 and aarch64."""
NETWORK = {
    "socket": (41, 198),
    # what leads from one of a pair to others, or lets it hold more memory
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "setsockopt": (54, 208),
}
"""System calls of sockets that are no pair."""
SOCKETPAIR, SENDTO = (53, 199), (44, 206)
"""A pair, which asyncio needs, holds at most what the kernel allows by default: 208 KiB in each direction."""
CLONE, CLONE3 = (56, 220), (435, 435)
NEW_NAMESPACES = 0x7E020000
OF_PROCESS = {"prlimit64": (302, 261), "sched_setaffinity": (203, 122)}
"""System calls that a process may make for itself, by the number 0, and not for another."""
ARGUMENTS = 16
"""Place of the first argument of a system call in what a filter reads; each has eight bytes, the lower half first."""
OF_OWNERS = {
    "x86_64": (90, 91, 92, 93, 94, 132, 188, 189, 190, 197, 198, 199, 235, 260, 261, 268, 280, 452),
    "aarch64": (5, 6, 7, 14, 15, 16, 52, 53, 54, 55, 88, 452),
}
"""System calls that change modes, owners, times and attributes of files, which Landlock does not refuse."""

LIBC = ctypes.CDLL(None, use_errno=True)


def enter_namespaces(is_root: bool) -> None:
    """Move this process, which has one thread, to new namespaces; of processes only its children belong to them.

    Raises:
        OSError: This user may not, or the kernel cannot.
    """
    user, group = os.getuid(), os.getgid()
    _check(LIBC.unshare(NEW_MOUNTS | NEW_IPC | NEW_PIDS | (0 if is_root else NEW_USER)), "unshare")
    if not is_root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def shared_memory_options(memory_mib: int) -> bytes:
    """Return the options of a ``/dev/shm`` of a size; the kernel keeps a KiB of an empty file, too."""
    return f"size={memory_mib}m,nr_inodes={64 * memory_mib},mode=1777".encode()


def mount_own_view(options: bytes) -> None:
    """Show the namespaces' own processes in ``/proc``, and a ``/dev/shm`` of its own with these options.

    Raises:
        OSError: A mount was refused.
    """
    _check(LIBC.mount(None, b"/", None, PRIVATE_TREE, None), "mount /")
    if LIBC.mount(b"proc", b"/proc", b"proc", NOSUID_NODEV, None) != 0:  # in some containers
        _check(LIBC.mount(b"none", b"/proc", b"tmpfs", NOSUID_NODEV, b"size=4k"), "mount /proc")
    if os.path.isdir(SHARED_MEMORY):
        _check(LIBC.mount(b"none", SHARED_MEMORY.encode(), b"tmpfs", NOSUID_NODEV, options), f"mount {SHARED_MEMORY}")


def end_like(child: int) -> NoReturn:
    """Wait for a child, and end this process as it ended."""
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def can_filter() -> bool:
    """Return whether the numbers of this machine's system calls are known."""
    return platform.machine() in ARCHITECTURES


def filter_system_calls(network: bool, owners: bool = True) -> None:
    """Refuse system calls in this process and its children for good, with EPERM.

    Args:
        network: Whether sockets stay allowed, beyond pairs of connected ones.
        owners: Whether changes of files' modes, owners, times and attributes do.

    Raises:
        OSError: The kernel has no such filter.
    """
    architecture, column = ARCHITECTURES[platform.machine()]
    refused = REFUSED | ({} if network else NETWORK)
    numbers = {numbers[column] for numbers in refused.values()}
    numbers |= set(() if owners else OF_OWNERS[platform.machine()])
    program = _program(architecture, sorted(numbers), _by_arguments(column, network))
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer)))
    _check(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0), "seccomp")


Instruction: TypeAlias = tuple[int, int, int, int]
"""Instruction of a filter: code, jump if true, jump if false, operand."""


def _program(architecture: int, numbers: Iterable[int], by_arguments: Iterable[Instruction]) -> list[Instruction]:
    """Return the filter's instructions."""
    refuse = (RETURN, 0, 0, REFUSE)
    program = [(LOAD, 0, 0, 4), (JUMP_IF_EQUAL, 1, 0, architecture), refuse, (LOAD, 0, 0, 0)]
    if architecture == ARCHITECTURES["x86_64"][0]:
        program += [(JUMP_IF_AT_LEAST, 0, 1, X32), refuse]
    for number in numbers:
        program += [(JUMP_IF_EQUAL, 0, 1, number), refuse]
    return [*program, *by_arguments, (RETURN, 0, 0, ALLOW)]


def _by_arguments(column: int, network: bool) -> list[Instruction]:
    """Return the part of a filter that allows system calls with some arguments alone."""
    program = [(JUMP_IF_EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, REFUSE_AS_UNKNOWN)]  # the C library takes clone
    program += _allow_if(CLONE[column], (LOAD, 0, 0, ARGUMENTS), (JUMP_IF_BITS, 1, 0, NEW_NAMESPACES))
    for numbers in OF_PROCESS.values():
        program += _allow_if(numbers[column], (LOAD, 0, 0, ARGUMENTS), (JUMP_IF_EQUAL, 0, 1, 0))
    if not network:
        family, kind = (LOAD, 0, 0, ARGUMENTS), (LOAD, 0, 0, ARGUMENTS + 8)
        is_pair = (family, (JUMP_IF_EQUAL, 0, 4, AF_UNIX), kind, (AND, 0, 0, 15), (JUMP_IF_EQUAL, 0, 1, SOCK_STREAM))
        program += _allow_if(SOCKETPAIR[column], *is_pair)
        low, high = (LOAD, 0, 0, ARGUMENTS + 4 * 8), (LOAD, 0, 0, ARGUMENTS + 4 * 8 + 4)
        has_no_address = (low, (JUMP_IF_EQUAL, 0, 3, 0), high, (JUMP_IF_EQUAL, 0, 1, 0))
        program += _allow_if(SENDTO[column], *has_no_address)
    return program


def _allow_if(number: int, *test: Instruction) -> list[Instruction]:
    """Return what allows a system call where ``test`` goes on behind itself, and refuses it one instruction later."""
    return [(JUMP_IF_EQUAL, 0, len(test) + 2, number), *test, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
