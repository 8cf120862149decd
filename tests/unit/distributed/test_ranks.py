"""Who can connect to the ranks of one host, and how a rank tells that another one is gone."""

from __future__ import annotations

import sys

import pytest
from forked import free_port, run_forked
from lightning.fabric.plugins.environments import LightningEnvironment

from rlplug.distributed.ranks import RankLauncher
from rlplug.errors import ConfigError

ADDRESSES = """
import os, sys, psutil, torch
import torch.distributed as dist
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from rlplug.distributed.ranks import join_ranks, listening_store
port, timeout = int(sys.argv[2]), timedelta(seconds=60)
if sys.argv[1] == "join":
    store = join_ranks("gloo", "127.0.0.1", port, 0, 1, is_one_host=True, timeout=timeout)
    assert store is None
    dist.all_reduce(torch.ones(1))
else:
    with ThreadPoolExecutor(2) as pool:
        store_of = lambda is_master: listening_store("127.0.0.1", port, 2, is_master, timeout)
        stores = list(pool.map(store_of, (True, False)))
    stores[0].set("a", "b")
    assert stores[1].get("a") == b"b"
listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
print(sorted({address.ip for address in listening}), port in {address.port for address in listening})
"""


@pytest.mark.parametrize(("what", "has_store"), [("join", False), ("store", True)])
def test_only_this_host_can_connect(what: str, has_store: bool) -> None:
    done = run_forked([sys.executable, "-c", ADDRESSES, what, str(free_port())], timeout=60, check=True)
    assert done.stdout.strip() == f"['127.0.0.1'] {has_store}"


def test_a_notebook_has_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone catches a notebook whose other ranks would run the kernel's own command line."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert RankLauncher(LightningEnvironment(), 1, 1).launch(lambda: "trained") == "trained"
    with pytest.raises(ConfigError, match=r"devices is 2, and a notebook trains on one"):
        RankLauncher(LightningEnvironment(), 2, 1).launch(lambda: None)


def test_one_of_several_nodes_is_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone catches a run that waits half an hour, without a word, for nodes that nobody starts."""
    for name in ("NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"num_nodes is 2, and nothing says which .* rlplug launch or torchrun"):
        RankLauncher(LightningEnvironment(), 1, 2).launch(lambda: None)
    monkeypatch.setenv("NODE_RANK", "0")
    assert RankLauncher(LightningEnvironment(), 1, 2).launch(lambda: "joined") == "joined"


ENDS = """
import subprocess, sys, threading, time, types
from rlplug.distributed import ranks
ranks.GRACE_S, ranks.WATCH_S = 0.1, 0.1
launcher = ranks.RankLauncher.__new__(ranks.RankLauncher)
launcher.procs = [subprocess.Popen([sys.executable, "-S", "-c", ""])]
launcher.procs[0].wait()
trainer = types.SimpleNamespace(training=True, should_stop=sys.argv[1] == "last step")
threading.Thread(target=launcher._watch, args=(trainer,), daemon=True).start()
time.sleep(2)
"""


@pytest.mark.parametrize("when", ["in a step", "last step"])
def test_a_rank_that_ends_with_status_0_in_a_step_ends_the_others(when: str) -> None:
    """Alone catches ranks that wait 30 minutes in a collective for one that a ``sys.exit(0)`` of a reward has ended."""
    done = run_forked([sys.executable, "-c", ENDS, when], timeout=120)
    assert done.returncode == (1 if when == "in a step" else 0)
    assert ("rank 1 ended with status 0, and the others end with it." in done.stderr) == (when == "in a step")
