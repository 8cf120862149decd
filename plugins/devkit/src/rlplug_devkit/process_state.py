"""What a plugin may not change of the process that it shares with the trainer, and what that process holds."""

from __future__ import annotations

import asyncio
import builtins
import csv
import ctypes
import decimal
import faulthandler
import gc
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy
import psutil
import pytest
import torch
from numpy.random.mtrand import get_bit_generator

SIGNALS: Final[Mapping[str, int]] = {
    name: getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGALRM", "SIGPIPE")
    if hasattr(signal, name)
}
SHARED_HELPERS: Final = ("resource_tracker", "forkserver", "rlplug_devkit.other_process")
"""Parts of the command lines of helper processes, Python's own and the kit's, which last as long as the process."""
_FUNCTIONS: Final[Mapping[Any, Sequence[str]]] = {
    os: ("kill", "system", "fork", "putenv", "remove", "removedirs", "rename", "chdir", "getcwd", "urandom"),
    time: ("time", "sleep", "monotonic", "perf_counter"),
    socket: ("socket", "create_connection", "getaddrinfo"),
    subprocess: ("Popen", "run"),
    random: ("random", "shuffle", "Random"),
    json: ("dumps", "loads"),
    signal: ("signal", "alarm"),
    asyncio: ("run", "new_event_loop", "get_event_loop"),
    ssl: ("_create_default_https_context", "create_default_context"),
    torch.nn.Linear: ("forward",),
    torch.nn.Embedding: ("forward",),
    torch.nn.LayerNorm: ("forward",),
    torch.nn.RMSNorm: ("forward",),
    torch.nn.functional: (
        *("linear", "embedding", "softmax", "log_softmax", "cross_entropy", "scaled_dot_product_attention"),
        *("layer_norm", "rms_norm", "silu", "gelu", "dropout"),
    ),
}
SHARED_FUNCTIONS: Final = [
    (f"{module.__name__}.{name}", module, name) for module, names in _FUNCTIONS.items() for name in names
]
"""Functions of Python's and torch's modules that the whole process calls, and that some code replaces."""
TABLES: Final = (
    ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
    ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
    ("transformers.modeling_rope_utils", "ROPE_INIT_FUNCTIONS"),
    ("transformers.activations", "ACT2FN"),
)
"""Tables of functions that models look up by a name of their configuration; new names are nobody else's."""
MODULE_HOOKS: Final = (
    *("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks"),
    *("_global_parameter_registration_hooks", "_global_module_registration_hooks"),
)
LIMITS: Final = {name: number for name, number in vars(resource).items() if name.startswith("RLIMIT_")}
LIBRARIES: Final = ("rlplug", "lightning", "torch", "transformers", "datasets", "asyncio", "httpx")
"""Loggers of libraries, whose level others have chosen where there is one."""
M_MMAP_THRESHOLD: Final = -3
"""Option of glibc's ``mallopt``, of ``malloc.h``."""
BLOCK_BYTES: Final = 32768
"""Smallest block that goes back to the system when it is freed: the smallest matrix of the kit's tiny Llama."""
_OF_OTHERS: Final = ("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "TORCHINDUCTOR_CACHE_DIR", "PYTEST_CURRENT_TEST")
OF_OTHERS: Final = frozenset([*_OF_OTHERS, *map(os.fsencode, _OF_OTHERS)])
"""Environment variables that torch's compiler sets when anything in the process first compiles, and pytest's."""
VENDORED: Final = os.path.join("setuptools", "_vendor")
DENORMAL: Final = 1e-310
"""A number that torch.set_flush_denormal makes 0, since it sets the processor's mode."""
MT19937_BYTES: Final = 4 * (624 + 1)
"""Size of the state of NumPy's generator: its numbers, and the place among them."""
LOGGERS: Final = ("rlplug", "lightning.pytorch", "py.warnings")
"""Loggers of the run, besides the root's."""


def generator_states() -> dict[str, Any]:
    """Return the states of the global random generators, by name."""
    return {
        "random": random.getstate(),
        "numpy.random": _numpy_state(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


def _numpy_state() -> Any:
    """Return the state of NumPy's global generator but for a normal number that it keeps for the next call.

    ``numpy.random.get_state`` copies it number by number, which takes a tenth of a millisecond.
    """
    generator = get_bit_generator()
    if isinstance(generator, numpy.random.MT19937):
        return ctypes.string_at(generator.ctypes.state_address, MT19937_BYTES)
    return repr(generator.state)


def moved(before: dict[str, Any]) -> set[str]:
    """Return the names of the generators whose state differs from ``before``."""
    after = generator_states()
    return {name for name in before if before[name] != after[name]}


def process_state() -> dict[str, Any]:
    """Return settings of the whole process that code elsewhere reads, by name; values can be compared."""
    root = logging.getLogger()
    return {
        "torch's default dtype": torch.get_default_dtype(),
        # set_default_device leaves its mode behind, also for the device that was the default before
        "torch's default device": (torch.get_default_device(), _has_device_mode()),
        "torch's threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's inference mode": torch.is_inference_mode_enabled(),
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's precision of float32 products": torch.get_float32_matmul_precision(),
        "torch's anomaly detection": torch.is_anomaly_enabled(),
        "torch's autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "torch's hooks of saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        "torch's hooks of all modules": [list(getattr(torch.nn.modules.module, name)) for name in MODULE_HOOKS],
        "torch's modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "torch's threads of a backward pass": torch.autograd.is_multithreading_enabled(),
        "torch's kernels of attention": _attention_kernels(),
        "torch's denormal numbers": DENORMAL * 2 == 0,
        "torch.backends.cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "numpy's error handling": tuple(sorted(numpy.geterr().items())),
        "signal handlers": {name: signal.getsignal(number) for name, number in SIGNALS.items()},
        "environment variables": _environment(),
        "working directory": os.getcwd(),
        "the umask": _umask(),
        # setuptools puts its own packages at the end when anything first imports it
        "sys.path": [entry for entry in sys.path if not str(entry).endswith(VENDORED)],
        # by name: torch puts the same one around itself for each process group
        "sys.excepthook": getattr(sys.excepthook, "__qualname__", repr(sys.excepthook)),
        "the recursion limit": sys.getrecursionlimit(),
        "the garbage collector": (gc.isenabled(), gc.get_threshold()),
        "the default timeout of sockets": socket.getdefaulttimeout(),
        "the root logger": (root.level, root.disabled, logging.root.manager.disable, list(root.handlers)),
        "loggers of the run": {name: _levels(logging.getLogger(name)) for name in LOGGERS},
        "warnings": [repr(entry[:3]) for entry in warnings.filters if _is_for_all(entry)],
        "log levels": {name: logging.getLogger(name).level for name in LIBRARIES if name in root.manager.loggerDict},
        "functions of modules": {text: id(getattr(module, name, None)) for text, module, name in SHARED_FUNCTIONS},
        "tables of functions": _tables(),
        "the longest integer as text": sys.get_int_max_str_digits(),
        "the time zone": time.tzname,
        "the folder of temporary files": tempfile.gettempdir(),
        "the limits of resources": {name: resource.getrlimit(number) for name, number in LIMITS.items()},
        "the way to show warnings": warnings.showwarning,
        "the start method of multiprocessing": multiprocessing.get_start_method(allow_none=True)
        or multiprocessing.get_all_start_methods()[0],  # the default, which a first lock, such as tqdm's, settles
        "the decimal context": (*_precision(decimal.getcontext()), *_precision(decimal.DefaultContext)),
        "the longest field of a CSV file": csv.field_size_limit(),
        "how arrays are printed": (repr(numpy.get_printoptions()), repr(torch._tensor_str.PRINT_OPTS)),
        "how tensors are shared": torch.multiprocessing.get_sharing_strategy(),  # type: ignore[no-untyped-call]
        "the alarm of the process": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        "the policy of event loops": type(asyncio.get_event_loop_policy()).__qualname__,
        "the locale": locale.setlocale(locale.LC_ALL),
        "sys.stdout and sys.stderr": (sys.stdout, sys.stderr),
        "traces and profiles of Python": (sys.gettrace(), sys.getprofile(), sys.getswitchinterval()),
        "faulthandler": faulthandler.is_enabled(),
        "threading.excepthook": threading.excepthook,
        "built-in functions": _builtins(),
        "the process's priority": os.getpriority(os.PRIO_PROCESS, 0) if hasattr(os, "getpriority") else None,
        "the CPU affinity": os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
    }


def thread_state() -> dict[str, Any]:
    """Return settings that each thread has of its own, which a later call on the same one finds; values compare."""
    return {
        "torch's threads": torch.get_num_threads(),
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's inference mode": torch.is_inference_mode_enabled(),
        "torch's default device": _has_device_mode(),
        "numpy's error handling": tuple(sorted(numpy.geterr().items())),
        "the decimal context": _precision(decimal.getcontext()),
    }


def _attention_kernels() -> tuple[bool, ...]:
    cuda: Any = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()


def _precision(context: decimal.Context) -> tuple[int, str]:
    return context.prec, context.rounding


def _has_device_mode() -> bool:
    """Return whether ``torch.set_default_device`` was called; torch has no function that says so."""
    return getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None) is not None


def _umask() -> str | None:
    """Return the mask of new files' modes; os.umask would have to set it to read it."""
    try:
        status = os.open("/proc/self/status", os.O_RDONLY)
    except OSError:
        return None
    try:
        return os.read(status, 256).partition(b"Umask:")[2].partition(b"\n")[0].decode().strip()
    finally:
        os.close(status)


def _environment() -> dict[str | bytes, str | bytes]:
    """Return the environment's variables; where os.environ is Python's own, as bytes, which need no decoding."""
    variables: Any = getattr(os.environ, "_data", os.environ)
    return {name: value for name, value in variables.items() if name not in OF_OTHERS}


def _tables() -> dict[str, int]:
    """Return the ids of what ``TABLES`` have, of modules that are imported."""
    found: dict[str, int] = {}
    for module, name in TABLES:
        table: Any = getattr(sys.modules.get(module), name, {})
        items = dict.items(table) if isinstance(table, dict) else table.items()  # ACT2FN makes an object of each value
        found |= {f"{name}[{key!r}]": id(value) for key, value in items}
    return found


def _builtins() -> dict[str, int]:
    """Return the ids of all built-in functions but ``_``, which gettext and a console set."""
    found = vars(builtins).copy()
    found.pop("_", None)
    return dict(zip(found, map(id, found.values()), strict=True))


def _is_for_all(entry: Any) -> bool:
    """Return whether a filter of warnings is about a whole category of Python's own, wherever it comes from."""
    _, message, category, module, line = entry
    return bool(message is None and module is None and line == 0 and category.__module__ == "builtins")


def _levels(logger: logging.Logger) -> tuple[int, bool, bool]:
    return logger.level, logger.disabled, logger.propagate


def changes_since(before: dict[str, Any]) -> dict[str, str]:
    """Return what of :func:`process_state` differs from ``before``, each with the former and the present value."""
    after, changes = process_state(), {}
    for of_imports in ("log levels", "tables of functions"):  # and of no later one
        after[of_imports] = {name: after[of_imports].get(name) for name in before[of_imports]}
    for name, former in before.items():
        if after[name] != former:
            changes[name] = _difference(former, after[name])
    return changes


def _difference(former: Any, present: Any) -> str:
    if isinstance(former, dict):
        names = sorted(os.fsdecode(n) for n in former.keys() | present.keys() if former.get(n) != present.get(n))
        return ", ".join(names)
    if isinstance(former, list):
        others = [repr(entry) for entry in [*former, *present] if (entry in former) != (entry in present)]
        return ", ".join(others) or "another order, or entries twice"
    return f"{former} became {present}"


@dataclass(frozen=True)
class Holdings:
    """What this process and those below it hold."""

    num_bytes: int
    """Memory that would be free if they ended."""
    num_bytes_below: int
    """What of it the processes below hold. This one may give up memory meanwhile, and hide how theirs grows."""
    threads: int
    files: int
    """Open files and sockets of this process."""
    processes: frozenset[int]
    """Ids of the processes below this one, without Python's own helpers."""


def num_held() -> dict[str, int]:
    """Return the numbers of threads, open files and processes that this process has, without measuring memory."""
    gc.collect()
    own = psutil.Process()
    return {
        "threads": threading.active_count(),
        "open files": own.num_fds() if hasattr(own, "num_fds") else 0,
        "processes": len(own.children()),
    }


@contextmanager
def new_objects_alone() -> Iterator[None]:
    """Let the garbage collector look at nothing that is there already: the body finds and frees what is newer.

    Of a million objects, which torch and Lightning bring, each look takes a second.
    """
    gc.collect()
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


def num_alive(kinds: tuple[type, ...]) -> int:
    """Return the number of objects of these classes that something refers to."""
    gc.collect()
    return sum(issubclass(type(each), kinds) for each in gc.get_objects())  # isinstance would ask proxies


def holdings() -> Holdings:
    """Return what this process holds, after freeing what waits for the garbage collector or for malloc."""
    gc.collect()
    _return_free_memory()
    own = psutil.Process()
    below = children()
    num_bytes_below = sum(map(_bytes_of, below))
    return Holdings(
        num_bytes=_bytes_of(own) + num_bytes_below,
        num_bytes_below=num_bytes_below,
        threads=threading.active_count(),
        files=own.num_fds() if hasattr(own, "num_fds") else 0,
        processes=frozenset(process.pid for process in below),
    )


def _bytes_of(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().uss)
    except psutil.Error:  # it ended, or belongs to somebody else
        return 0


def children() -> list[psutil.Process]:
    """Return the processes below this one, those included that have ended and that nobody has waited for."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if not any(word in " ".join(process.cmdline()) for word in SHARED_HELPERS):
                found.append(process)
        except psutil.ZombieProcess:
            found.append(process)
        except psutil.Error:  # it ended meanwhile
            continue
    return found


def still_there(processes: Sequence[psutil.Process], seconds: float) -> list[str]:
    """Return the names of those processes that have not ended after ``seconds``, wherever their parents are.

    One that has ended, and whose parent is this process, is still there until somebody waits for it.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = [name for name in map(_name_if_there, processes) if name is not None]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _name_if_there(process: psutil.Process) -> str | None:
    try:
        if not process.is_running():
            return None
        status = process.status()
        if status == psutil.STATUS_ZOMBIE and process.ppid() != os.getpid():
            return None
        return f"{process.pid} ({process.name()}, {status})"
    except psutil.NoSuchProcess:
        return None


def return_blocks_when_freed(environment: pytest.MonkeyPatch) -> None:
    """Have glibc return blocks to the system as soon as they are freed, here and in processes that start later.

    Otherwise what a process keeps fills the free part of its heap first, and is not seen.

    Args:
        environment: Sets the variable for other processes, until it is undone.
    """
    environment.setenv("MALLOC_MMAP_THRESHOLD_", str(BLOCK_BYTES))
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, BLOCK_BYTES)


def _return_free_memory() -> None:
    """Have glibc return freed memory to the system: else its amount depends on what was freed before."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
