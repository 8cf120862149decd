"""``PromptStream``: an endless stream of prompts, epoch after epoch, which resumes exactly."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from rlplug.errors import RunError
from rlplug.types import Prompt, Sample


class TrainingPrompts(ABC):
    """Endless training prompts, the same on all ranks, which resume exactly."""

    sources: Sequence[str] = ()
    """Names of the sources of a mixture, which ``Prompt.source`` has; empty otherwise."""
    may_differ = False
    """Whether :meth:`load_state_dict` takes the position in other prompts, if it can; a run that resumes sets it."""

    @property
    @abstractmethod
    def num_prompts(self) -> int | None:
        """Number of prompts of one pass; ``None`` where nobody has counted them."""

    @property
    @abstractmethod
    def longest_prompt(self) -> int:
        """Length that no prompt exceeds, in tokens."""

    @property
    @abstractmethod
    def by_uid(self) -> Mapping[str, Prompt]:
        """Prompts by uid."""

    @abstractmethod
    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next ``num_prompts`` prompts in a new list; a prompt may occur twice."""

    def observe(  # noqa: B027 - most streams learn nothing
        self, samples: Sequence[Sample], gather_arrays: Callable[[NDArray[Any]], NDArray[Any]]
    ) -> None:
        """Learn from this rank's scored samples of a step which prompts to draw; by default nothing. Collective."""

    def metrics(self) -> dict[str, float]:
        """Return what is to log about the prompts after a step."""
        return {}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position, and under ``fingerprint`` what it belongs to, as plain data or tensors."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved position.

        Raises:
            ConfigError: The position was saved for other prompts or another order.
        """


class PromptStream(TrainingPrompts):
    """Endless stream of prompts, epoch after epoch. It depends on its arguments alone, so all ranks get the same.

    Args:
        prompts: Prompts of one epoch; at least one.
        shuffle: Draw a new order for each epoch; otherwise keep the order of ``prompts``.
        seed: Seed that determines each epoch's order, together with the epoch's number.
    """

    def __init__(self, prompts: Sequence[Prompt], shuffle: bool = True, seed: int | str = 0) -> None:
        assert prompts, "a stream without prompts would never return from take"
        self.epoch = 0
        """Epoch of the next prompt."""
        self.position = 0
        """Index of the next prompt within its epoch, always below the number of prompts."""
        self._prompts = tuple(prompts)
        self._shuffle = shuffle
        self._seed = seed
        self._order = self._epoch_order()
        self._fingerprint = fingerprint(self._prompts) | {"shuffle": shuffle, "seed": seed if shuffle else None}

    def __len__(self) -> int:
        """Return the number of prompts in an epoch."""
        return len(self._prompts)

    @property
    def num_prompts(self) -> int:
        return len(self)

    @property
    def longest_prompt(self) -> int:
        return max(len(prompt.token_ids) for prompt in self._prompts)

    @property
    def by_uid(self) -> dict[str, Prompt]:
        return {prompt.uid: prompt for prompt in self._prompts}

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next ``num_prompts`` prompts; they may span epochs, so a prompt can occur twice."""
        taken: list[Prompt] = []
        while len(taken) < num_prompts:
            end = min(len(self), self.position + num_prompts - len(taken))
            indices = self._order[self.position : end]
            taken += [self._prompts[index] for index in indices]
            self.position = end
            if end == len(self):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._epoch_order()
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return the position and a fingerprint of the arguments, as plain data."""
        return {"epoch": self.epoch, "position": self.position, "fingerprint": dict(self._fingerprint)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved position.

        Raises:
            ConfigError: The position was saved for other prompts or another order.
        """
        from rlplug.data.same_prompts import is_same

        goes_on = is_same(state, self._fingerprint, self.may_differ)
        self.epoch, self.position = (state["epoch"], state["position"]) if goes_on else (state["epoch"] + 1, 0)
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._prompts)))
        # hashed together, so that epoch 1 of seed 0 is not epoch 0 of seed 1
        digest = hashlib.sha256(f"{self._seed}:{self.epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
        order: list[int] = torch.randperm(len(self._prompts), generator=generator).tolist()
        return order


def fingerprint(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return the number of prompts, and hashes of their uids, of their token ids, and of answers and metadata."""
    uids, token_ids, answers = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    for prompt in prompts:
        uids.update(prompt.uid.encode() + b"\n")
        token_ids.update(array("q", (len(prompt.token_ids), *prompt.token_ids)).tobytes())
        answers.update(_as_json([prompt.answer, dict(prompt.metadata)]).encode())
    hashes = {"uids": uids.hexdigest(), "token_ids": token_ids.hexdigest(), "answers": answers.hexdigest()}
    return {"num_prompts": len(prompts), **hashes}


def require_same_prompts(prompts: Sequence[Prompt], gather: Callable[[list[Any]], list[Any]], step: int) -> None:
    """Check that all ranks have read the same prompts. Collective.

    Raises:
        RunError: They have not.
    """
    if len(set(gather([fingerprint(prompts)["token_ids"]]))) > 1:
        raise RunError(
            f"step {step}: the ranks read different prompts from data.train: it changed while it was read, or is not "
            "the same on all hosts. Resume with data that stay as they are."
        )


def _as_json(value: Any) -> str:
    """Return plain data as JSON, with the names of classes in place of their objects."""
    try:
        return json.dumps(value, default=lambda part: type(part).__qualname__, skipkeys=True)
    except (ValueError, RecursionError):  # it holds itself
        return type(value).__qualname__
