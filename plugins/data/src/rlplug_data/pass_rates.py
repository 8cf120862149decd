"""Pass rates of prompts, by which a curriculum draws them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from rlplug.errors import ConfigError
from rlplug.types import Sample, reaches

GROUP_RESULT: Final = np.dtype([("index", np.int64), ("num_passed", np.int64), ("num_scored", np.int64)])
"""What ranks tell each other of a group: the index of its prompt, completions that passed, and those with a reward."""


@dataclass(frozen=True)
class Window:
    """Pass rates that are wanted: the options of :class:`~rlplug_data.curriculum.PassRateCurriculum`."""

    low: float = 0.1
    high: float = 0.9
    outside: float = 0.2
    smoothing: float = 0.5
    pass_threshold: float = 1.0


class PassRates:
    """Pass rates of the prompts of a stream, the same on every rank: 4 bytes a prompt.

    Args:
        window: Those that are wanted.
        num_prompts: Prompts of the stream.
        seed: Seed of the draws.
    """

    def __init__(self, window: Window, num_prompts: int, seed: int | str) -> None:
        self._window = window
        self._seed = seed
        self._rates = np.full(num_prompts, np.nan, np.float32)
        self._turn = 0
        self._num_turns = self._num_skipped = self._num_groups = self._num_mixed = 0

    def accepts(self, index: int) -> bool:
        """Return whether to draw the prompt ``index``, now that its turn has come."""
        window, rate = self._window, float(self._rates[index])
        is_drawn = math.isnan(rate) or (reaches(rate, window.low) and reaches(window.high, rate))
        if not is_drawn:
            digest = hashlib.sha256(f"{self._seed}:{self._turn}:outside".encode()).digest()
            is_drawn = int.from_bytes(digest[:8], "big") / 2**64 < window.outside
        self._turn += 1
        self._num_turns += 1
        self._num_skipped += not is_drawn
        return is_drawn

    def observe(
        self,
        samples: Sequence[Sample],
        index_of: Mapping[str, int],
        gather_arrays: Callable[[NDArray[Any]], NDArray[Any]],
    ) -> None:
        """Take the rewards of a step's groups into the pass rates. Collective.

        Args:
            samples: This rank's, of whole groups; those without a reward do not count.
            index_of: Index of each prompt by its uid; samples of other prompts are passed over.
            gather_arrays: Returns the concatenation of all ranks' arrays.
        """
        mine = np.zeros(len(samples), GROUP_RESULT)
        mine["index"] = [index_of.get(sample.prompt.uid, -1) for sample in samples]
        mine["num_scored"] = [not sample.errors for sample in samples]
        threshold = self._window.pass_threshold
        mine["num_passed"] = [not sample.errors and reaches(sample.reward, threshold) for sample in samples]
        found = gather_arrays(mine[(mine["index"] >= 0) & (mine["num_scored"] > 0)])
        indices, places = np.unique(found["index"], return_inverse=True)
        passed, scored = (np.bincount(places, found[name], len(indices)) for name in ("num_passed", "num_scored"))
        new, old = passed / scored, self._rates[indices]
        weight = np.where(np.isnan(old), 1.0, self._window.smoothing)
        self._rates[indices] = weight * new + (1 - weight) * np.nan_to_num(old)
        self._num_groups += len(indices)
        self._num_mixed += int(((new > 0) & (new < 1)).sum())

    def metrics(self) -> dict[str, float]:
        """Return the shares of all prompts, and what was skipped and learned from since the last call."""
        known = self._rates[~np.isnan(self._rates)]
        below = int((~reaches(known, self._window.low)).sum())
        above = int((~reaches(-known, -self._window.high)).sum())
        counts = {"below": below, "within": len(known) - below - above, "above": above}
        metrics = {f"curriculum/{name}": count / len(self._rates) for name, count in counts.items()}
        metrics["curriculum/unknown"] = 1 - len(known) / len(self._rates)
        metrics["curriculum/skipped_share"] = self._num_skipped / max(self._num_turns, 1)
        metrics["curriculum/effective_share"] = self._num_mixed / max(self._num_groups, 1)
        self._num_turns = self._num_skipped = self._num_groups = self._num_mixed = 0
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return ``rates`` [prompts], float32, NaN for a prompt without one, and the number of turns so far."""
        return {"rates": torch.from_numpy(self._rates.copy()), "turn": self._turn}

    def check_state(self, state: Any) -> None:
        """Refuse a saved state that is none.

        Raises:
            ConfigError: It has another form, or its rates are no shares.
        """
        saved: Mapping[str, Any] = state if isinstance(state, Mapping) else {}
        rates: Any = saved.get("rates")
        is_right = isinstance(rates, torch.Tensor) and rates.shape == self._rates.shape and rates.dtype == torch.float32
        if not is_right or not isinstance(saved.get("turn"), int) or bool(((rates < 0) | (rates > 1)).any()):
            raise ConfigError(
                "The checkpoint's pass rates of PassRateCurriculum are damaged: resume from another checkpoint."
            )

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take a state that :meth:`check_state` has seen; ``None`` begins without pass rates."""
        if state is None:
            self._rates[:], self._turn = np.nan, 0
        else:
            self._rates, self._turn = state["rates"].numpy().copy(), state["turn"]
