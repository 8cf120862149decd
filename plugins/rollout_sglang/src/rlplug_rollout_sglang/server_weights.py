"""Sends the trainer's weights to SGLang's schedulers, over a process group as torch makes it."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Final

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from rlplug.errors import RunError
from rlplug.interfaces import EngineFault
from rlplug.rollout.servers.process_group import GroupBackend, SendGroup
from rlplug.rollout.servers.weight_sender import Group, Rendezvous, TensorList, WeightSender
from rlplug_rollout_sglang.server_settings import server_info

FLUSH_S: Final = 10.0
"""How long requests that were aborted may take to be gone."""

TAKES_POST_ALONE: Final = 405
"""Answer to a GET of a route that is there."""


class SGLangWeightSender(WeightSender):
    """SGLang's routes for weights: they come with the trainer's version, which completions then carry."""

    engine = "SGLang"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._group_name = f"rlplug-{uuid.uuid4().hex}"  # a name can be used once in the life of a server
        self._backend: GroupBackend = "nccl" if self._device.type == "cuda" else "gloo"
        self._has_sessions: dict[str, bool] = {}

    def num_workers(self, url: str) -> int:
        # newer ones take weights between two calls
        self._has_sessions[url] = self._client.status(f"{url}/begin_weight_update") == TAKES_POST_ALONE
        return int(server_info(self._client, url)["tp_size"])

    def ask_to_join(self, url: str, meeting: Rendezvous) -> Future[Any]:
        payload = {
            "master_address": meeting.address,
            "master_port": meeting.port,
            "rank_offset": meeting.rank_offset,
            "world_size": meeting.world_size,
            "group_name": self._group_name,
            "backend": self._backend,
        }
        return self.ask(url, "init_weights_update_group", payload)

    def join(self, address: str, port: int, world_size: int) -> Group:
        return torch_group(self._backend, self._group_name, address, port, world_size, self._device, self._deadline_s)

    def remedy(self) -> str:
        return "A server of rollout.urls that another trainer used before may have to start anew."

    def begin(self, url: str) -> None:
        if not self._has_sessions[url]:
            return
        try:
            self.ask(url, "begin_weight_update", {}).result()
        except EngineFault:
            raise
        except RunError:  # a trainer that is gone may have left a sync open
            self.ask(url, "end_weight_update", {}).result()
            self.ask(url, "begin_weight_update", {}).result()

    def ask_to_receive(self, url: str, tensors: TensorList, version: int) -> Future[Any]:
        payload = {
            **asdict(tensors),
            "group_name": self._group_name,
            "flush_cache": False,
            "weight_version": str(version),
        }
        return self.ask(url, "update_weights_from_distributed", payload)

    def finish(self) -> None:
        self._ask_all("end_weight_update", lambda url: self._has_sessions[url], "could not take its new weights")
        problem = "could not empty its prefix cache: do requests of somebody else run there?"
        self._ask_all(f"flush_cache?timeout={FLUSH_S:g}", lambda _: True, problem)

    def _ask_all(self, route: str, is_asked: Callable[[str], bool], problem: str) -> None:
        questions = {url: self.ask(url, route, {}) for url in self._urls if is_asked(url)}
        for url, question in questions.items():
            try:
                question.result()
            except EngineFault:
                raise
            except RunError as refusal:
                raise EngineFault(f"{url} {problem} {refusal}") from refusal

    def leave(self) -> None:
        payload = {"group_name": self._group_name}
        for url in self._urls:
            question = self._client.ask("POST", f"{url}/destroy_weights_update_group", payload)
            with contextlib.suppress(RunError):  # one that is gone has no group any more
                self._client.spawn(question).result()


def torch_group(
    backend: GroupBackend,
    name: str,
    address: str,
    port: int,
    world_size: int,
    device: torch.device,
    timeout_s: float,
) -> SendGroup:
    """Join, as rank 0, a group that the others make with ``init_custom_process_group`` of SGLang.

    That gives ``_new_process_group_helper`` of torch a store with the group's name as prefix; torch adds the name once
    more, and then the kind of device.
    """
    store = TCPStore(address, port, world_size, is_master=True, timeout=timedelta(seconds=timeout_s))
    named = PrefixStore(f"{name}/", PrefixStore(name, store))
    where = PrefixStore("cuda/" if backend == "nccl" else "cpu/", named)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return SendGroup(backend, where, 0, world_size, address, timeout_s)
