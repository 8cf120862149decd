"""Fixtures of batches of random tokens, and of what the update does with one of them on several ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from model_fixtures import VOCABULARY
from once import made_once
from ranks import run_ranks
from rlplug_devkit.padded_rows import PaddedRows
from safetensors.torch import save_file

from rlplug.types import Prompt, Sample, StepBatch


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., PaddedRows]:
    """Make a batch of random tokens from the length of each row's prompt and completion."""

    def make(lengths: list[tuple[int, int]], seed: int = 0, group_size: int = 1) -> PaddedRows:
        generator = torch.Generator().manual_seed(seed)
        samples = []
        for row, (num_prompt, num_new) in enumerate(lengths):
            tokens = tuple(torch.randint(2, VOCABULARY, (num_prompt + num_new,), generator=generator).tolist())
            samples.append(
                Sample(
                    prompt=Prompt(uid=str(row), token_ids=tokens[:num_prompt], text=""),
                    group=row // group_size,
                    token_ids=tokens,
                    response_mask=(False,) * num_prompt + (True,) * num_new,
                    rollout_logprobs=(0.0,) * (num_prompt + num_new),
                    completion="",
                    finish_reason="stop",
                    policy_version=0,
                    reward=float(torch.randn((), generator=generator)),
                )
            )
        return PaddedRows.of(StepBatch.from_samples(samples))

    return make


@pytest.fixture(scope="session")
def update_batch(
    make_batch: Callable[..., PaddedRows], model_folder: Callable[[str], Path], load_policy: Any
) -> PaddedRows:
    """What ``update_worker.py`` updates on: eleven rows, of which row 8 has no reward and row 9 no completion.

    Of 99 tokens: a pass of 16 holds one of the five long rows, or three of the short ones.
    """
    lengths = [(3, 12), (2, 14), (5, 9), (4, 11), (6, 8), (2, 3), (1, 2), (3, 1), (2, 2), (4, 0), (1, 4)]
    batch = make_batch(lengths, seed=4, group_size=3)
    batch.response_mask[8] = batch.reward_valid[8] = False
    with torch.no_grad():
        logits = load_policy(model_folder("qwen2"))(batch.input_ids).logits[:, :-1] / 0.8
    logprobs = logits.log_softmax(dim=-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
    logprobs = torch.nn.functional.pad(logprobs, (1, 0))
    generator = torch.Generator().manual_seed(5)
    noise = [torch.randn(batch.input_ids.shape, generator=generator) for _ in range(5)]
    return batch.replace(
        advantages=noise[0].masked_fill(~batch.response_mask, 0.0),
        old_logprobs=(logprobs + 0.2 * noise[1]).masked_fill(~batch.response_mask, 0.0),
        ref_logprobs=(logprobs + 0.5 * noise[2]).masked_fill(~batch.response_mask, 0.0),
        values=noise[3].masked_fill(~batch.response_mask, 0.0),
        returns=noise[4].masked_fill(~batch.response_mask, 0.0),
    )


SPLITS_OF_A_PUSH = ("3", "40 tokens")
"""Of ``update_worker.py``: how the rows are cut into passes."""
SPLITS_OF_A_NIGHT = ("1", "all", "16 tokens")
SPLITS = [*SPLITS_OF_A_PUSH, *(pytest.param(split, marks=pytest.mark.nightly) for split in SPLITS_OF_A_NIGHT)]


@pytest.fixture(scope="session")
def updated(
    update_batch: PaddedRows,
    model_folder: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    pytestconfig: pytest.Config,
) -> Callable[[int], tuple[Path, dict[str, Any]]]:
    """Return the folder and the results of ``update_worker.py`` on that many processes."""
    done: dict[int, tuple[Path, dict[str, Any]]] = {}
    has_night = not pytestconfig.option.markexpr.startswith("not nightly")
    splits = [*SPLITS_OF_A_PUSH, *SPLITS_OF_A_NIGHT * has_night]

    def make(folder: Path, world_size: int) -> None:
        shutil.copytree(model_folder("qwen2"), folder / "model")
        save_file(update_batch.tensors(), folder / "batch.safetensors")
        worker = str(Path(__file__).parent / "unit/training/update_worker.py")
        run_ranks([worker, str(folder), str(world_size), *splits], world_size)

    def run(world_size: int) -> tuple[Path, dict[str, Any]]:
        if world_size not in done:
            make_it = partial(make, world_size=world_size)
            folder = made_once(tmp_path_factory, f"updated-{world_size}", make_it)
            done[world_size] = (folder, torch.load(folder / "results.pt"))
        return done[world_size]

    return run
