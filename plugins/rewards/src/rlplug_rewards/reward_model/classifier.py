"""A sequence classifier with one label, which scores lists of token ids in batches of a token budget."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from rlplug.errors import ConfigError, describe
from rlplug.models.hf_files import pretrained


def read_config(path: str) -> Any:
    """Return the configuration of a reward model.

    Raises:
        ConfigError: It cannot be read, or the model is no classifier with one label.
    """
    try:
        config = pretrained(AutoConfig.from_pretrained, path)
    except Exception as problem:  # noqa: BLE001 - files of wrong types raise anything
        raise ConfigError(
            f"RewardModel.path is {path!r}, which cannot be read ({describe(problem)}): name a folder or a model of "
            "the hub with a config.json."
        ) from None
    names = [str(name) for name in config.architectures or []]
    if not any(name.endswith("ForSequenceClassification") for name in names):
        raise ConfigError(
            f"RewardModel.path is {path!r}, a {names[0] if names else 'model without an architecture'}: give a "
            "sequence classifier (...ForSequenceClassification). Token-level reward models are not taken: a run's "
            "rewards are one number for each completion."
        )
    if config.num_labels != 1:
        raise ConfigError(
            f"RewardModel.path is {path!r}, which has {config.num_labels} labels: a reward model has one."
        )
    return config


def empty_classifier(path: str) -> torch.nn.Module:
    """Return the network on the meta device, which takes no memory."""
    make: Any = AutoModelForSequenceClassification.from_config
    with torch.device("meta"):
        network: torch.nn.Module = pretrained(make, read_config(path))
    return network


class Classifier:
    """A reward model on a device, which waits in host memory between calls where ``offload`` says so.

    Args:
        path: Folder, or name on the hub.
        device: Where it computes.
        dtype: Of weights and passes.
        offload: Whether it leaves the device after each call.

    Raises:
        ConfigError: It cannot be loaded, or its files lack weights.
    """

    def __init__(self, path: str, device: torch.device, dtype: torch.dtype, offload: bool) -> None:
        config = read_config(path)
        try:
            network, found = pretrained(
                AutoModelForSequenceClassification.from_pretrained,
                path,
                config=config,
                dtype=dtype,
                use_safetensors=True,  # other files may hold pickles
                output_loading_info=True,
            )
        except Exception as problem:  # noqa: BLE001 - likewise
            raise ConfigError(
                f"RewardModel.path is {path!r}, which cannot be loaded: {describe(problem).rstrip('.')}."
            ) from None
        for kind in ("missing_keys", "mismatched_keys"):
            if found[kind]:
                names = sorted(map(str, found[kind]))[:3]
                raise ConfigError(
                    f"RewardModel.path is {path!r}, whose files lack {names} in this model's shape: scores would be "
                    "random."
                )
        self._network: Any = network.eval().requires_grad_(False)
        self._device, self._offload = device, offload
        self._lock = threading.Lock()
        self._move(torch.device("cpu") if offload else device)

    def scores(self, rows: Sequence[Sequence[int]], max_tokens: int, ends_at: float) -> list[float | None]:
        """Return the score of each row of token ids, or ``None`` where ``ends_at`` came first.

        Args:
            rows: Token ids, at least one each.
            max_tokens: Most tokens of a pass, padding included; a longer row is a pass of its own.
            ends_at: Time of ``time.monotonic`` after which no pass begins.
        """
        scores: list[float | None] = [None] * len(rows)
        with self._lock, self._on_device():
            for batch in batches_of([len(row) for row in rows], max_tokens):
                if time.monotonic() >= ends_at:
                    break
                for index, score in zip(batch, self._pass([rows[index] for index in batch]), strict=True):
                    scores[index] = score
        return scores

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        self._move(self._device)
        try:
            yield
        finally:
            if self._offload:
                self._move(torch.device("cpu"))
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()

    @torch.inference_mode()
    def _pass(self, rows: Sequence[Sequence[int]]) -> list[float]:
        width = max(len(row) for row in rows)
        # Classifiers score the last token that is not the padding token. That is often an end token too, and of a row
        # that ends with it, they would score the token before. So rows are filled with a token that ends none of them.
        pad_id = next(number for number in itertools.count() if all(row[-1] != number for row in rows))
        self._network.config.get_text_config().pad_token_id = pad_id
        ids = torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in rows], device=self._device)
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        mask = (torch.arange(width, device=self._device) < lengths[:, None]).long()
        logits = self._network(input_ids=ids, attention_mask=mask).logits
        return [float(score) for score in logits.float().reshape(len(rows)).tolist()]

    def _move(self, device: torch.device) -> None:
        self._network.to(device)


def batches_of(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return indices in batches of at most ``max_tokens`` tokens, padding included, of rows of about one length."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        # the newest row is the longest
        if not batches or (len(batches[-1]) + 1) * lengths[index] > max_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches
