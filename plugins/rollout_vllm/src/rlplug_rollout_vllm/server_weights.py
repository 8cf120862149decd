"""Sends the trainer's weights to the workers of all servers, over one process group of its own."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Final
from urllib.parse import urlsplit

import torch

from rlplug.errors import RunError
from rlplug.interfaces import Bucket, EngineFault
from rlplug_rollout_vllm.gloo_transfer import BACKEND, GlooGroup, own_address
from rlplug_rollout_vllm.http_client import HTTPClient, ServerError

RESET_TRIES: Final = 50
RESET_AGAIN_S: Final = 0.1


def transfer_backend(device: torch.device) -> str:
    """Return vLLM's name of the way that weights take from a trainer on ``device``."""
    return "nccl" if device.type == "cuda" else BACKEND


class WeightSender:
    """The trainer's side, on its rank 0, of vLLM's weight transfer.

    It asks the servers to receive and sends at the same time. When one side fails, the other waits in vain: the
    group is of no use then, and both are made anew.

    Args:
        device: Where the trainer's weights are.
        deadline_s: For connecting, and for each bucket.
    """

    def __init__(self, client: HTTPClient, urls: Sequence[str], device: torch.device, deadline_s: float) -> None:
        self._client = client
        self._urls = urls
        self._device = device
        self._deadline_s = deadline_s
        self._group: Any = None

    def connect(self) -> None:
        """Form the group of this process and the workers of all servers.

        Raises:
            RunError: A server cannot.
        """
        sizes = [int(self._client.get(f"{url}/get_world_size")["world_size"]) for url in self._urls]
        address, port = address_for(self._urls), 0
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        world_size = 1 + sum(sizes)
        questions = []
        for index, url in enumerate(self._urls):
            init_info = {
                "master_address": address,
                "master_port": port,
                "rank_offset": 1 + sum(sizes[:index]),
                "world_size": world_size,
            }
            questions.append(self._ask(url, "init_weight_transfer_engine", {"init_info": init_info}))
        try:
            self._group = self._together(questions, lambda: self._join(address, port, world_size))
        except EngineFault as problem:
            config = json.dumps({"backend": transfer_backend(self._device)})
            raise RunError(
                f"vLLM's workers cannot join the trainer to take its weights: {problem} A server of rollout.urls needs "
                f"--weight-transfer-config '{config}'; one that another trainer used before may have to start anew."
            ) from problem

    def _join(self, address: str, port: int, world_size: int) -> Any:
        if self._device.type != "cuda":
            return GlooGroup(address, port, 0, world_size, self._deadline_s)
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        with torch.cuda.device(self._device):
            return trainer_init({"master_address": address, "master_port": port, "world_size": world_size})

    def send(self, buckets: Iterable[Bucket]) -> None:
        """Send all weights. What ``buckets`` raises leaves the servers ready for another sync.

        Raises:
            EngineFault: A server did not take them.
        """
        for url in self._urls:
            self._open(url)
        try:
            for bucket in buckets:
                self._send_bucket(bucket)
        except EngineFault:
            raise
        except BaseException:
            self._finish()
            raise
        self._finish()

    def _open(self, url: str) -> None:
        try:
            self._ask(url, "start_weight_update").result()
        except ServerError:  # a trainer that is gone may have left a sync open
            with contextlib.suppress(ServerError):
                self._ask(url, "finish_weight_update").result()
            self._ask(url, "start_weight_update").result()

    def _send_bucket(self, bucket: Bucket) -> None:
        tensors = [tensor.to(self._device).contiguous() for _, tensor in bucket]
        update_info = {
            "names": [name for name, _ in bucket],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
        }
        questions = [self._ask(url, "update_weights", {"update_info": update_info}) for url in self._urls]
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        self._together(questions, lambda: self._broadcast(tensors, stream))

    def _broadcast(self, tensors: Sequence[torch.Tensor], stream: Any) -> None:
        if stream is None:
            for tensor in tensors:
                self._group.broadcast(tensor)
            return
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            for tensor in tensors:
                self._group.broadcast(tensor, src=0, stream=stream)
        stream.synchronize()

    def _finish(self) -> None:
        questions = [self._ask(url, "finish_weight_update") for url in self._urls]
        for question in questions:
            question.result()
        for url in self._urls:
            self._reset_prefix_cache(url)

    def _reset_prefix_cache(self, url: str) -> None:
        """Blocks of requests that were aborted are held until the scheduler's next step."""
        for _ in range(RESET_TRIES):
            if self._ask(url, "reset_prefix_cache").result()["success"]:
                return
            time.sleep(RESET_AGAIN_S)
        raise EngineFault(f"{url} could not reset its prefix cache: do requests of somebody else run there?")

    def close(self) -> None:
        """Leave the group; also one in which a transfer hangs."""
        group, self._group = self._group, None
        if group is not None:
            group.destroy()

    # ---- both sides at once ---------------------------------------------------------------------------------------

    def _ask(self, url: str, route: str, payload: dict[str, Any] | None = None) -> Future[Any]:
        return self._client.spawn(
            self._client.ask("POST", f"{url}/{route}", payload, self._deadline_s, "sync_deadline_s")
        )

    def _together(self, questions: Sequence[Future[Any]], work: Callable[[], Any]) -> Any:
        """Run ``work`` while servers answer; return its result when both are done.

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

        threading.Thread(target=run, name="vllm-weights", daemon=True).start()
        futures = [*questions, result]
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


def address_for(urls: Sequence[str]) -> str:
    """Return the address of this host that all servers reach: its own loopback, if they are all here."""
    hosts = [urlsplit(url).hostname or "" for url in urls]
    return own_address(next((host for host in hosts if not is_loopback(f"//{host}")), hosts[0]))


def is_loopback(url: str) -> bool:
    """Whether a URL is of this host alone."""
    host = urlsplit(url).hostname or ""
    return host == "localhost" or host == "::1" or host.startswith("127.")
