"""torchao's 8-bit AdamW under FSDP2: near to AdamW, and its checkpoint loads on another number of processes.

torchao is no part of the development environment: transformers imports it at every start where it is installed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from optims_models import set_gradients, wide_model

pytest.importorskip("torchao", reason="pip install rlplug-optims[torchao]")

WORKER = str(Path(__file__).with_name("adamw_8bit_worker.py"))


def test_near_to_adamw_and_loads_on_one_process(tmp_path, ranks):
    from adamw_8bit_worker import NUM_STEPS, RATE

    for world_size in (2, 1):
        ranks([WORKER, str(tmp_path)], world_size)
    two, one = (torch.load(tmp_path / f"results-{n}.pt") for n in (2, 1))
    assert "OptimState8bit" in two["kinds"]
    assert two["state"].keys() == one["state"].keys()
    for name, value in two["state"].items():
        torch.testing.assert_close(one["state"][name], value, rtol=0, atol=0)

    model, initial = wide_model(), wide_model().state_dict()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(NUM_STEPS):
        set_gradients(model, step)
        optimizer.step()
    for name, weight in model.state_dict().items():
        change, wanted = two["weights"][name] - initial[name], weight - initial[name]
        assert float((change - wanted).norm()) < 0.1 * float(wanted.norm()), name  # 8 bits, a scale for 256 values
