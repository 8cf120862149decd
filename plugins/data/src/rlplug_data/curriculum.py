"""``PassRateCurriculum``: prompts that are always or never solved are drawn less often."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray

from rlplug.data.prompt_stream import TrainingPrompts
from rlplug.data.sources import PromptRow, PromptSource, TrainingRows
from rlplug.errors import ConfigError
from rlplug.types import Prompt, Sample
from rlplug.types.ranges import PositiveShare, RewardValue, Share, check_ranges
from rlplug_data.mixture import MixtureSource
from rlplug_data.pass_rates import PassRates, Window

if TYPE_CHECKING:
    from rlplug.data.prompt_encoder import PromptEncoder


class PassRateCurriculum(PromptSource):
    """Prompts of another source, of which those whose pass rate is outside a window are drawn less often.

    The pass rate of a prompt is a moving average over its groups of this run. A group whose completions all pass, or
    all fail, has no advantages in GRPO and its kin; the lower bound of an update's improvement grows with the variance
    of success, ``p (1 - p)`` (arXiv 2504.03380, arXiv 2502.12272).

    Args:
        source: The prompts; not a mixture, whose sources each take a curriculum of their own.
        low: Smallest pass rate in the window.
        high: Largest pass rate in the window.
        outside: Chance of a prompt outside the window to be drawn when its turn comes, above 0: so its pass rate is
            measured again. A prompt without a pass rate is always drawn.
        smoothing: Weight of a prompt's newest group in its pass rate; 1 forgets the ones before.
        pass_threshold: A completion passes when its reward is at least this.
    """

    def __init__(
        self,
        source: PromptSource,
        low: Share = 0.1,
        high: Share = 0.9,
        outside: PositiveShare = 0.2,
        smoothing: PositiveShare = 0.5,
        pass_threshold: RewardValue = 1.0,
    ) -> None:
        self.source = source
        self.low, self.high, self.outside = low, high, outside
        self.smoothing, self.pass_threshold = smoothing, pass_threshold
        check_ranges(self)
        if low > high:
            raise ConfigError(f"PassRateCurriculum.low is {low} and its high {high}: give 0 <= low <= high <= 1.")
        if isinstance(source, MixtureSource):
            raise ConfigError(
                "PassRateCurriculum.source is a MixtureSource, whose weights would not hold: put a curriculum around "
                "each of its sources that needs one."
            )

    def rows(self) -> Iterator[PromptRow]:
        return self.source.rows()

    def for_training(self, key: str, name: str = "") -> TrainingRows:
        window = Window(self.low, self.high, self.outside, self.smoothing, self.pass_threshold)
        return CurriculumRows(self.source.for_training(f"{key}.init_args.source", name), window, key)


class CurriculumRows(TrainingRows):
    """Rows of a source whose prompts a curriculum draws.

    Args:
        rows: The rows.
        window: Which pass rates are wanted.
        key: Key of the curriculum, for messages.
    """

    def __init__(self, rows: TrainingRows, window: Window, key: str) -> None:
        self._rows, self._window, self._key = rows, window, key
        self.known = rows.known

    def prompts(self, encoder: PromptEncoder, shuffle: bool, seed: int | str) -> CurriculumPrompts:
        prompts = self._rows.prompts(encoder, shuffle, seed)
        if prompts.num_prompts is None:
            raise ConfigError(
                f"{self._key} is a PassRateCurriculum, which draws prompts again by their pass rate, of a source that "
                "streams, which keeps none: leave one of them out."
            )
        return CurriculumPrompts(prompts, self._window, seed)


class CurriculumPrompts(TrainingPrompts):
    """Training prompts that pass over some whose pass rate is outside a window.

    Args:
        prompts: The prompts in their order.
        window: Which pass rates are wanted.
        seed: Seed of what is passed over.
    """

    def __init__(self, prompts: TrainingPrompts, window: Window, seed: int | str) -> None:
        self._prompts = prompts
        self._index_of = {uid: index for index, uid in enumerate(prompts.by_uid)}
        self._rates = PassRates(window, len(self._index_of), seed)

    @property
    def num_prompts(self) -> int | None:
        return self._prompts.num_prompts

    @property
    def longest_prompt(self) -> int:
        return self._prompts.longest_prompt

    @property
    def by_uid(self) -> Mapping[str, Prompt]:
        return self._prompts.by_uid

    def take(self, num_prompts: int) -> list[Prompt]:
        taken: list[Prompt] = []
        while len(taken) < num_prompts:
            (prompt,) = self._prompts.take(1)
            if self._rates.accepts(self._index_of[prompt.uid]):
                taken.append(prompt)
        return taken

    def observe(self, samples: Sequence[Sample], gather_arrays: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
        self._rates.observe(samples, self._index_of, gather_arrays)

    def metrics(self) -> dict[str, float]:
        return self._prompts.metrics() | self._rates.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the prompts, and under ``pass rates`` what was learned of them."""
        return {**self._prompts.state_dict(), "pass rates": self._rates.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; one without pass rates is that of the source alone.

        Raises:
            ConfigError: The state is of other prompts, or its pass rates are damaged.
        """
        self._prompts.may_differ = self.may_differ
        is_same = state.get("fingerprint") == self._prompts.state_dict()["fingerprint"]
        saved = state.get("pass rates") if is_same or not self.may_differ else None
        if saved is not None:
            self._rates.check_state(saved)
        self._prompts.load_state_dict({key: value for key, value in state.items() if key != "pass rates"})
        if saved is None:
            rank_zero_warn("PassRateCurriculum, or its prompts, are new since the checkpoint: no pass rates are known.")
        self._rates.load_state_dict(saved)
