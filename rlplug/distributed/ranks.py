"""Processes of a run: how they are started, how they find each other, and what they do when one of them is gone."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from rlplug.errors import ConfigError

LAUNCHER_VARIABLE: Final = "RLPLUG_LAUNCHER"
"""Environment variable with the process id of rank 0, for the ranks that it started."""
AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"
"""torchrun's environment variable, ``True`` where its agent has the store of the ranks."""
LOOPBACK: Final = "127.0.0.1"
LOOPBACK_INTERFACES: Final = ("lo", "lo0")
WATCH_S: Final = 0.5
GRACE_S: Final = 5.0
"""Time in seconds in which a rank may end by itself when another one is gone; most collectives fail at once then."""
LOST_PEER: Final = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
"""Parts of gloo's messages for a collective whose other side has ended."""
RESUME: Final = "Its own message, if it had one, says why. Go on from the newest checkpoint with rlplug fit --resume."


class RankLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of the other ranks of this host, with an end for all when one of them fails.

    Lightning's own kills rank 0 without a word, up to 5 s after another rank has ended, also in a run that Ctrl-C ends.
    """

    is_ending = False
    """Whether the run ends, so that ranks may end in any order."""

    is_interactive_compatible = True  # with one process

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        if self.num_processes > 1 and hasattr(sys, "ps1"):
            raise ConfigError(
                f"trainer.devices is {self.num_processes}, and a notebook trains on one: other ranks run a script. "
                "Set devices to 1, or use rlplug fit or a script."
            )
        if self.num_nodes > 1 and not {"NODE_RANK", "GROUP_RANK"} & os.environ.keys():  # it would wait for the others
            raise ConfigError(
                f"trainer.num_nodes is {self.num_nodes}, and nothing says which of them this is: start the run with "
                "rlplug launch or torchrun, or set NODE_RANK, MASTER_ADDR and MASTER_PORT on each node."
            )
        if self.num_processes > 8 * (cpus := os.cpu_count() or 1):
            raise ConfigError(f"trainer.devices is {self.num_processes} on {cpus} processors: give {8 * cpus} at most.")
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
            self._call_children_scripts()
            del os.environ[LAUNCHER_VARIABLE]
            watch = threading.Thread(target=self._watch, args=(trainer,), name="rlplug-ranks", daemon=True)
            watch.start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def _watch(self, trainer: Any) -> None:
        while True:
            time.sleep(WATCH_S)
            may_end = self.is_ending or trainer is None or trainer.should_stop or not trainer.training
            for rank, process in enumerate(self.procs, start=1):
                status = process.poll()
                if (status and not self.is_ending) or (status == 0 and not may_end):
                    from rlplug.distributed.child_process import ending

                    end_this_rank(f"rank {rank} {ending(status)}", self.procs)


def watch_launcher() -> None:
    """Let this process end with the rank 0 that started it, if one did."""
    launcher = int(os.environ.pop(LAUNCHER_VARIABLE, "0"))

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(WATCH_S)
        end_this_rank(f"rank 0, process {launcher}, has ended")

    if launcher:
        threading.Thread(target=watch, name="rlplug-rank-0", daemon=True).start()


def end_this_rank(reason: str, others: Sequence[subprocess.Popen[bytes]] = ()) -> None:
    """End the process with status 1 from a thread, unless it ends by itself within the grace time.

    Its main thread may wait in a collective for ever, and only the end of the process ends that wait.
    """
    time.sleep(GRACE_S)
    for process in others:
        process.kill()
    print(f"rlplug: {reason}, and the others end with it. {RESUME}", file=sys.stderr, flush=True)
    os._exit(1)


def waiting_time(phase_deadline_s: float | None) -> timedelta:
    """Return how long ranks wait for one in a phase, which ends itself at its deadline; a year for ``None``."""
    return timedelta(days=365) if phase_deadline_s is None else timedelta(seconds=phase_deadline_s + 60)


def lost_rank(error: BaseException) -> str | None:
    """Return a message when an error of a collective means that another rank has gone, else ``None``."""
    has_ranks = dist.is_initialized() and dist.get_world_size() > 1
    is_lost = has_ranks and isinstance(error, RuntimeError) and any(part in str(error) for part in LOST_PEER)
    if not is_lost and not isinstance(error, dist.DistError):
        return None
    name = "another rank"
    if has_ranks:
        from rlplug.distributed.child_process import ended_rank

        name = ended_rank(dist.distributed_c10d._get_default_store(), dist.get_world_size(), GRACE_S)
    return f"{name} has ended, and this one with it. {RESUME}"


# ---- the store in which ranks find each other ---------------------------------------------------------------------


def join_ranks(
    backend: str, address: str, port: int, rank: int, world_size: int, is_one_host: bool, **options: Any
) -> Store | None:
    """Make the default process group, unless there is one, and return its store; ``None`` for a single process.

    Ranks of one host listen on its loopback interface alone. Torch's own store would listen on all interfaces, and it
    takes writes from anybody. Ranks of several hosts use torch's, and under torchrun the store is that of its agent.

    Args:
        address: Host of rank 0, which listens at ``port``.
        is_one_host: Whether all processes run on this host.
        options: More arguments of ``init_process_group``, such as ``timeout``.
    """
    if is_one_host:
        names = [name for _, name in socket.if_nameindex() if name in LOOPBACK_INTERFACES]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", ",".join(names[:1]))  # gloo's own connections
    if not dist.is_initialized():
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
        if world_size == 1:
            options["store"] = HashStore()
        elif is_one_host and is_loopback(address) and os.environ.get(AGENT_STORE) != "True":
            options["store"] = listening_store(LOOPBACK, port, world_size, rank == 0, options["timeout"])
        dist.init_process_group(backend, rank=rank, world_size=world_size, **options)
        if backend == "nccl":
            atexit.register(_leave)
    if world_size == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    store.set(f"process/{rank}", f"{socket.gethostname()} {os.getpid()}")
    return store


def listening_store(address: str, port: int, world_size: int, is_master: bool, timeout: timedelta) -> TCPStore:
    """Return a store whose master listens on ``address`` alone, an address of this host.

    Args:
        world_size: Number of processes that use the store; the master waits for all of them.
        timeout: For joining, and for each operation.
    """
    if not is_master:
        return TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family, backlog=128) as listener:
        descriptor = listener.detach()  # the store closes it
    return TCPStore(
        address, port, world_size, is_master=True, timeout=timeout, master_listen_fd=descriptor, wait_for_workers=True
    )


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is of the loopback interface."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
