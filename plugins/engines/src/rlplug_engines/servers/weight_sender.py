"""Sends the trainer's weights to the workers of all engines, over one process group."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any, Final

import torch

from rlplug.errors import RunError
from rlplug.interfaces import Bucket, EngineFault
from rlplug_engines.servers.addresses import address_for, free_ports
from rlplug_engines.servers.process_group import Group, Rendezvous

PARTS: Final = ("stop", "transfer", "resume")
"""Of a sync, in their order."""


@dataclass(frozen=True)
class TensorList:
    """Names, dtypes and shapes of a bucket's tensors."""

    names: list[str]
    dtypes: list[str]
    """Such as ``bfloat16``."""
    shapes: list[list[int]]


class WeightSender(ABC):
    """The trainer's side of a weight transfer, on its rank 0.

    It has the workers receive and sends at the same time. When one side fails, the other waits in vain: the group is of
    no use then, and the core starts trainer and engines anew.

    Args:
        urls: Names of the engines, or the URLs of their servers.
        device: Holds the trainer's weights.
        deadline_s: For joining, and for each bucket.
    """

    engine: str
    """For messages."""

    def __init__(self, urls: Sequence[str], device: torch.device, deadline_s: float) -> None:
        self._urls = urls
        self._device = device
        self._deadline_s = deadline_s
        self._group: Group | None = None

    # ---- one engine's way -----------------------------------------------------------------------------------------

    @abstractmethod
    def num_workers(self, url: str) -> int:
        """Return how many processes of an engine receive weights."""

    @abstractmethod
    def ask_to_join(self, url: str, rendezvous: Rendezvous) -> Future[Any]:
        """Have the workers of an engine join the group."""

    @abstractmethod
    def join(self, address: str, port: int, world_size: int) -> Group:
        """Join as rank 0."""

    @abstractmethod
    def remedy(self) -> str:
        """Return what to do about an engine that cannot join, as a sentence."""

    @abstractmethod
    def begin(self, url: str) -> None:
        """Have an engine expect weights; also one whose last trainer ended in the middle of a sync."""

    @abstractmethod
    def ask_to_receive(self, url: str, tensors: TensorList, version: int) -> Future[Any]:
        """Have an engine's workers receive a bucket from the group."""

    @abstractmethod
    def finish(self) -> None:
        """Have all engines use the weights that came, and drop their prefix caches."""

    def abandon(self) -> None:
        """Have all engines end a sync that broke off, so that another may begin; by default as one that is complete."""
        self.finish()

    # ---- what the trainer calls -----------------------------------------------------------------------------------

    def connect(self) -> None:
        """Form the group of this process and the workers of all engines.

        Raises:
            RunError: An engine cannot.
        """
        sizes = [self.num_workers(url) for url in self._urls]
        address = address_for(self._urls)
        (port,) = free_ports(1, address)
        world_size = 1 + sum(sizes)
        joins = [
            self.ask_to_join(url, Rendezvous(address, port, 1 + sum(sizes[:index]), world_size))
            for index, url in enumerate(self._urls)
        ]
        try:
            self._group = self._together(joins, lambda: self.join(address, port, world_size))
        except EngineFault as problem:
            raise RunError(
                f"{self.engine}'s workers cannot join the trainer to take its weights: {problem} {self.remedy()}"
            ) from problem

    def send(self, buckets: Iterable[Bucket], version: int) -> dict[str, float]:
        """Send all weights. What ``buckets`` raises leaves the engines ready for another sync.

        Returns:
            Seconds that it took until engines had stopped (``stop``), until they had all weights (``transfer``, the
            making of buckets included), and until they could go on (``resume``).

        Raises:
            EngineFault: An engine did not receive them.
        """
        times = [time.perf_counter()]
        for url in self._urls:
            self.begin(url)
        times.append(time.perf_counter())
        try:
            for bucket in buckets:
                self._send_bucket(bucket, version)
        except EngineFault:
            raise
        except BaseException:
            self.abandon()
            raise
        times.append(time.perf_counter())
        self.finish()
        times.append(time.perf_counter())
        return {name: end - begin for name, (begin, end) in zip(PARTS, itertools.pairwise(times), strict=True)}

    def leave(self) -> None:  # noqa: B027 - most engines forget a group when its rank 0 is gone
        """Have engines that stay leave the group, as far as they still answer."""

    def close(self) -> None:
        """Leave the group; also one in which a transfer hangs."""
        group, self._group = self._group, None
        if group is not None:
            group.destroy()

    # ---- both sides at once ---------------------------------------------------------------------------------------

    def _send_bucket(self, bucket: Bucket, version: int) -> None:
        tensors = [tensor.to(self._device).contiguous() for _, tensor in bucket]
        listed = TensorList(
            names=[name for name, _ in bucket],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            shapes=[list(tensor.shape) for tensor in tensors],
        )
        answers = [self.ask_to_receive(url, listed, version) for url in self._urls]
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        self._together(answers, lambda: self._broadcast(tensors, stream))

    def _broadcast(self, tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream | None) -> None:
        assert self._group is not None
        with contextlib.ExitStack() as stack:
            if stream is not None:
                stack.enter_context(torch.cuda.device(self._device))
                stack.enter_context(torch.cuda.stream(stream))
            for tensor in tensors:
                self._group.broadcast(tensor)
        if stream is not None:
            stream.synchronize()

    def _together(self, others: Sequence[Future[Any]], work: Callable[[], Any]) -> Any:
        """Run ``work`` beside the others; return its result when all are done.

        Raises:
            EngineFault: One failed, or was not done by the deadline. ``work`` may hang then, in a thread that
                does not keep the process from ending.
        """
        result: Future[Any] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as problem:  # noqa: BLE001 - it is raised in the other thread
                result.set_exception(problem)

        threading.Thread(target=run, name="rollout-weights", daemon=True).start()
        futures = [*others, result]
        done, pending = wait(futures, self._deadline_s, FIRST_EXCEPTION)
        for future in done:
            if problem := future.exception():
                if isinstance(problem, EngineFault):
                    raise problem
                raise EngineFault(f"the transfer of weights failed: {type(problem).__name__}: {problem}") from problem
        if pending:
            raise EngineFault(
                f"the transfer of weights took longer than rollout.sync_deadline_s {self._deadline_s:g} s."
            )
        return result.result()
