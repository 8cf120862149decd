"""Groups outside torch's registry: members find each other, and tensors keep their bits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from rlplug_engines.servers.addresses import LOOPBACK, free_ports
from rlplug_engines.servers.process_group import Rendezvous, SendGroup
from torch._C._distributed_c10d import PrefixStore, TCPStore

CPU = torch.device("cpu")


def join_by_hand(rendezvous: Rendezvous) -> SendGroup:
    """Join as another library does, whose store has the prefixes "a", "b" and "c"."""
    timeout = timedelta(seconds=30)
    store = TCPStore(rendezvous.address, rendezvous.port, rendezvous.world_size, is_master=False, timeout=timeout)
    nested = PrefixStore("c", PrefixStore("b", PrefixStore("a", store)))
    return SendGroup("gloo", nested, rendezvous.rank_offset, rendezvous.world_size, rendezvous.address, 30.0)


def join(rendezvous: Rendezvous) -> SendGroup:
    return SendGroup.over_tcp(rendezvous, CPU, 30.0, ["a", "b", "c"])


@pytest.mark.parametrize(
    ("other", "dtype", "address"),
    [
        (join, torch.bfloat16, LOOPBACK),
        (join_by_hand, torch.float8_e4m3fn, LOOPBACK),
        (join, torch.float32, "::1"),
    ],
)
def test_tensors_keep_their_bits(other: Callable[[Rendezvous], SendGroup], dtype: torch.dtype, address: str) -> None:
    (port,) = free_ports(1, address)
    sent, received = torch.arange(6.0).view(2, 3).to(dtype), torch.zeros(2, 3).to(dtype)
    with ThreadPoolExecutor(2) as pool:
        trainer = pool.submit(join, Rendezvous(address, port, 0, 2))
        worker = pool.submit(other, Rendezvous(address, port, 1, 2))
        groups = trainer.result(60), worker.result(60)
        for future in [pool.submit(groups[0].broadcast, sent), pool.submit(groups[1].broadcast, received)]:
            future.result(60)
    assert torch.equal(sent.float(), received.float())
    for group in groups:
        group.destroy()


def test_payload_has_the_names_that_engines_use() -> None:
    payload = Rendezvous("10.0.0.1", 1234, 3, 5).payload()
    assert payload == {"master_address": "10.0.0.1", "master_port": 1234, "rank_offset": 3, "world_size": 5}
