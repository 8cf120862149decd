"""Sends the trainer's weights to vLLM's workers, through its own weight transfer."""

from __future__ import annotations

import contextlib
import json
import time
from concurrent.futures import Future
from typing import Any, Final

import torch

from rlplug.interfaces import EngineFault
from rlplug.rollout.servers.http_client import ServerError
from rlplug.rollout.servers.weight_sender import Group, Rendezvous, TensorList, WeightSender
from rlplug_rollout_vllm.gloo_transfer import BACKEND, gloo_group

RESET_TRIES: Final = 50
RESET_AGAIN_S: Final = 0.1


def transfer_backend(device: torch.device) -> str:
    """Return vLLM's name of the way that weights take from a trainer on ``device``."""
    return "nccl" if device.type == "cuda" else BACKEND


class NCCLGroup:
    """vLLM's own group for NCCL, as its workers have it."""

    def __init__(self, address: str, port: int, world_size: int) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self._group = trainer_init({"master_address": address, "master_port": port, "world_size": world_size})

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())

    def destroy(self) -> None:
        self._group.destroy()


class VLLMWeightSender(WeightSender):
    """The routes that ``VLLM_SERVER_DEV_MODE`` opens."""

    engine = "vLLM"

    def num_workers(self, url: str) -> int:
        return int(self._client.get(f"{url}/get_world_size")["world_size"])

    def ask_to_join(self, url: str, meeting: Rendezvous) -> Future[Any]:
        init_info = {
            "master_address": meeting.address,
            "master_port": meeting.port,
            "rank_offset": meeting.rank_offset,
            "world_size": meeting.world_size,
        }
        return self.ask(url, "init_weight_transfer_engine", {"init_info": init_info})

    def join(self, address: str, port: int, world_size: int) -> Group:
        if self._device.type != "cuda":
            return gloo_group(address, port, 0, world_size, self._deadline_s)
        with torch.cuda.device(self._device):
            return NCCLGroup(address, port, world_size)

    def remedy(self) -> str:
        config = json.dumps({"backend": transfer_backend(self._device)})
        return (
            f"A server of rollout.urls needs --weight-transfer-config '{config}'; one that another trainer used before "
            "may have to start anew."
        )

    def begin(self, url: str) -> None:
        try:
            self.ask(url, "start_weight_update").result()
        except ServerError:  # a trainer that is gone may have left a sync open
            with contextlib.suppress(ServerError):
                self.ask(url, "finish_weight_update").result()
            self.ask(url, "start_weight_update").result()

    def ask_to_receive(self, url: str, tensors: TensorList, version: int) -> Future[Any]:
        update_info = {"names": tensors.names, "dtype_names": tensors.dtypes, "shapes": tensors.shapes}
        return self.ask(url, "update_weights", {"update_info": update_info})

    def finish(self) -> None:
        questions = [self.ask(url, "finish_weight_update") for url in self._urls]
        for question in questions:
            question.result()
        for url in self._urls:
            self._reset_prefix_cache(url)

    def _reset_prefix_cache(self, url: str) -> None:
        """Blocks of requests that were aborted are held until the scheduler's next step."""
        for _ in range(RESET_TRIES):
            if self.ask(url, "reset_prefix_cache").result()["success"]:
                return
            time.sleep(RESET_AGAIN_S)
        raise EngineFault(f"{url} could not reset its prefix cache: do requests of somebody else run there?")
