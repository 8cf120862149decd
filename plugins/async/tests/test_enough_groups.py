"""Engines tell each other, through the ranks' store, which groups are complete."""

from __future__ import annotations

import torch.distributed as dist
from rlplug_async.enough_groups import CompleteGroups, EnoughGroups


def test_engines_learn_of_each_others_groups_of_the_same_step():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    first, second = CompleteGroups(server, 0, 2), CompleteGroups(client, 1, 2)
    assert first.exchange("0/1", [4]) == ({4}, False)  # the second one has not begun
    assert second.exchange("0/1", [1]) == ({1, 4}, False)
    assert first.exchange("0/2", []) == (set(), False)  # the second one is still in the former step
    assert second.exchange("0/2", [7], has_failed=True) == ({7}, True)
    assert first.exchange("0/2", [2]) == ({2, 7}, True)


def test_an_engine_goes_on_when_the_store_is_gone():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    engine = CompleteGroups(client, 1, 2)
    engine.exchange("0/1", [1])
    del server
    assert engine.exchange("0/1", [1, 2]) == ({1, 2}, False)


def test_what_is_enough_stays_enough():
    own = []
    is_enough = EnoughGroups(lambda: own, lambda numbers: len(numbers) >= 2, CompleteGroups(None, 0, 1), "0/1")
    assert not is_enough()
    own += [3, 5]
    assert is_enough()
    own.clear()
    assert is_enough()
