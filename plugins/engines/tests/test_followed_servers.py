"""An engine whose servers come and go under a launcher: which of them get weights and requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rlplug_engines.servers import EngineLabels, SchedulerState, ServerBackend, ServerEngine, ServerSettings
from rlplug_engines.servers.server_list import FILE_VARIABLE, ListedServer, write_server_list
from transformers import AutoModelForCausalLM

from rlplug.interfaces import EngineCapabilities, EngineFault, Placement
from rlplug.models.config import ModelConfig, load_spec, load_tokenizer
from rlplug.types import Request, SamplingParams
from rlplug.weight_sync.buckets import weight_buckets

CPU = torch.device("cpu")


@dataclass
class Options:
    tensor_parallel_size: int = 1


class Group:
    def broadcast(self, tensor: torch.Tensor) -> None:
        pass

    def destroy(self) -> None:
        pass


class EchoBackend(ServerBackend):
    """Notes who joins, gets weights and is asked; one token is each answer."""

    labels = EngineLabels("Echo", "HFRollout", "KEY")
    generate_route = "echo"
    metrics_route = "health"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.joined: dict[str, tuple[int, int]] = {}
        self.sent: set[str] = set()
        self.asked: set[str] = set()

    launch: Any = None

    async def settings(self, server: Any) -> ServerSettings:
        return ServerSettings(max_model_len=24, max_num_seqs=8, kv_cache_tokens=512, num_workers=2)

    def payload(self, pending: Any) -> dict[str, Any]:
        return {}

    def receive(self, pending: Any, answer: Any) -> None:
        self.asked.add(pending.url)
        pending.append([1], [-0.5])
        pending.finish_reason = "stop"

    def metrics(self, answer: Any) -> SchedulerState:
        return SchedulerState(0, 0, 0.0)

    async def join(self, server: Any, rendezvous: Any) -> None:
        self.joined[server.url] = rendezvous.rank_offset, rendezvous.world_size

    def make_group(self, *_: Any) -> Group:
        return Group()

    async def receive_weights(self, server: Any, *_: Any) -> None:
        self.sent.add(server.url)

    async def finish(self, server: Any) -> None:
        pass


class Echo(ServerEngine):
    capabilities = EngineCapabilities(colocated=False, disaggregated=True)
    backend_class = EchoBackend

    def __init__(self, urls: list[str]) -> None:
        super().__init__(Options(), None, urls, "KEY", 20.0, 20.0, 20.0)

    def seen(self) -> tuple[dict[str, tuple[int, int]], set[str], set[str]]:
        """Return who joined, got weights, and was asked, since the last call."""
        backend: Any = self._backend
        found = backend.joined, backend.sent, backend.asked
        backend.joined, backend.sent, backend.asked = {}, set(), set()
        return found


@pytest.fixture
def engine(
    url: str, client: Any, model_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Echo, Any, Path]]:
    """One with the list of its launcher and what syncs it."""
    file = tmp_path / "servers.json"
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    write_server_list(file, [ListedServer(url, 0)])
    folder = str(model_folder("qwen2"))
    config = ModelConfig(path=folder, dtype="float32")
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made = Echo(["http://127.0.0.1:9"])  # the list is newer than the command line
    made.start(load_spec(config, load_tokenizer(config)), Placement(CPU, 0, 1))
    yield made, lambda version: made.update_weights(weight_buckets(policy, torch.float32, 1 << 20), version), file
    made.close()


def test_weights_and_requests_follow_the_launchers_list(engine: tuple[Echo, Any, Path], url: str) -> None:
    echo, sync, file = engine
    other = url.replace("127.0.0.1", "localhost")
    requests = [Request(str(index), (1, 2), index) for index in range(4)]
    sampling = SamplingParams(max_new_tokens=2)
    report = sync(1)
    assert [*report.parts] == ["stop", "transfer", "resume"]
    assert 0 < sum(report.parts.values()) <= report.seconds
    echo.generate(requests, sampling)
    assert echo.seen() == ({url: (1, 3)}, {url}, {url})
    assert echo.max_context(echo._policy) == 24

    write_server_list(file, [ListedServer(url, 0), ListedServer(other, 0)])
    echo.generate(requests, sampling)
    assert echo.seen() == ({}, set(), {url}), "another server has no weights before the next sync"
    sync(2)
    echo.generate(requests, sampling)
    assert echo.seen() == ({url: (1, 5), other: (3, 5)}, {url, other}, {url, other})

    write_server_list(file, [ListedServer(url, 1), ListedServer(other, 0)])
    with pytest.raises(EngineFault, match=f"Echo on {url} ended or was lost"):
        echo.generate(requests, sampling)
    sync(3)
    assert echo.seen() == ({url: (1, 5), other: (3, 5)}, {url, other}, set())
    write_server_list(file, [])
    with pytest.raises(EngineFault, match="lists no server"):
        sync(4)
