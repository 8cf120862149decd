"""``MixtureSource``: prompts of several sources, drawn by weights."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray

from rlplug.data.prompt_stream import TrainingPrompts
from rlplug.data.rows import of_part
from rlplug.data.sources import PromptRow, PromptSource, TrainingRows
from rlplug.errors import ConfigError
from rlplug.types import Prompt, Sample
from rlplug.types.ranges import Range, check_ranges

if TYPE_CHECKING:
    from rlplug.data.prompt_encoder import PromptEncoder

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass
class WeightedSource:
    """A source of a mixture.

    Args:
        source: The prompts.
        weight: Its share of the training prompts, relative to the other weights; 0 leaves the source out, unread.
    """

    source: PromptSource
    weight: Annotated[float, Range(0, 1e9)] = 1.0

    def __post_init__(self) -> None:
        check_ranges(self)


class MixtureSource(PromptSource):
    """Prompts of several sources, each with a name and a weight.

    However many training prompts were drawn, each source has its share by weight, to within fewer prompts than there
    are sources. A source begins its next epoch when it is used up, whatever the others do, so a small one with a large
    weight repeats more often. As ``data.val``, every prompt of every source is scored once. Rows are named
    ``<source>/<name there>``, and ``Prompt.source`` has the name.

    Args:
        sources: Sources by name, each with ``source`` and ``weight``, 1 by default; 0 leaves a source out, unread. A
            name has letters, digits, ``_``, ``-`` and ``.``.
    """

    def __init__(self, sources: dict[str, WeightedSource]) -> None:
        for name, part in sources.items():
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"data source sources has the name {name!r}, which names metrics: use letters, digits, '_', '-' "
                    "and '.'."
                )
            if isinstance(part.source, MixtureSource):
                raise ConfigError(f"data source sources.{name} is a mixture itself: put its sources beside the others.")
        self.weights = {name: part.weight for name, part in sources.items() if part.weight > 0}
        if not self.weights:
            raise ConfigError("data source sources has none with a weight above 0: give at least one.")
        self._sources = {name: sources[name].source for name in self.weights}

    def rows(self) -> Iterator[PromptRow]:
        for name, source in self._sources.items():
            is_empty = True
            try:
                for row in source.rows():
                    is_empty = False
                    yield of_part(row, name)
            except ConfigError as error:
                raise ConfigError(f"sources.{name}: {error}") from error
            if is_empty:
                raise ConfigError(f"sources.{name}: {type(source).__name__} has no prompts: give it at least one.")

    def for_training(self, key: str, name: str = "") -> TrainingRows:
        parts = {
            part: source.for_training(f"{key}.init_args.sources.{part}.source", part)
            for part, source in self._sources.items()
        }
        return MixedRows(parts, self.weights)


class MixedRows(TrainingRows):
    """Rows of several sources.

    Args:
        parts: Those of each source, by its name.
        weights: Weight of each, above 0.
    """

    def __init__(self, parts: Mapping[str, TrainingRows], weights: Mapping[str, float]) -> None:
        self._parts, self._weights = parts, weights
        self.known = [row for part in parts.values() for row in part.known]

    def prompts(self, encoder: PromptEncoder, shuffle: bool, seed: int | str) -> MixedPrompts:
        # a seed for each: sources of one size would have the same order
        streams = {name: part.prompts(encoder, shuffle, f"{seed}/{name}") for name, part in self._parts.items()}
        warn_of_duplicates(streams)
        return MixedPrompts(streams, self._weights)


class MixedPrompts(TrainingPrompts):
    """Training prompts of several sources, of which the one that is furthest behind its weight is drawn next.

    So shares are exact at every step, without random numbers; each source keeps an order and epochs of its own.

    Args:
        streams: Training prompts by the name of their source.
        weights: Weight of each, above 0.
    """

    def __init__(self, streams: Mapping[str, TrainingPrompts], weights: Mapping[str, float]) -> None:
        total = math.fsum(weights.values())
        self.sources = tuple(streams)
        self._streams = dict(streams)
        self._shares = {name: weights[name] / total for name in streams}
        self._drawn = dict.fromkeys(streams, 0)

    @property
    def num_prompts(self) -> int | None:
        """Number of prompts of all sources together; ``None`` where one is not counted."""
        counts = [stream.num_prompts for stream in self._streams.values()]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def longest_prompt(self) -> int:
        return max(stream.longest_prompt for stream in self._streams.values())

    @property
    def by_uid(self) -> dict[str, Prompt]:
        return {uid: prompt for stream in self._streams.values() for uid, prompt in stream.by_uid.items()}

    def take(self, num_prompts: int) -> list[Prompt]:
        chosen = [self._choose() for _ in range(num_prompts)]
        of_source = {name: iter(self._streams[name].take(count)) for name, count in Counter(chosen).items()}
        return [next(of_source[name]) for name in chosen]

    def _choose(self) -> str:
        num_next = sum(self._drawn.values()) + 1
        name = max(self._streams, key=lambda name: self._shares[name] * num_next - self._drawn[name])  # first of equals
        self._drawn[name] += 1
        return name

    def observe(self, samples: Sequence[Sample], gather_arrays: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
        for name, stream in self._streams.items():
            stream.observe([sample for sample in samples if sample.prompt.source == name], gather_arrays)

    def metrics(self) -> dict[str, float]:
        of_streams = [stream.metrics() for stream in self._streams.values()]
        found: dict[str, float] = {}
        for name, metrics in zip(self._streams, of_streams, strict=True):
            found |= {
                f"source/{name}/{key.removeprefix('data/').replace('/', '_')}": value for key, value in metrics.items()
            }
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the number of prompts drawn of each source, its weight and its own state."""
        states = {name: stream.state_dict() for name, stream in self._streams.items()}
        return {
            "drawn": dict(self._drawn),
            "shares": dict(self._shares),
            "streams": states,
            "fingerprint": {name: state["fingerprint"] for name, state in states.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; other weights are counted from here on, and sources may come and go.

        Raises:
            ConfigError: The state is not of a mixture, or a source has other prompts or another order.
        """
        if "streams" not in state:
            raise ConfigError(
                "The checkpoint was written with one source in data.train, which is a MixtureSource now: name the "
                "source of then, or start a new run from its weights."
            )
        saved = state["streams"]
        former = {name: stream.state_dict() for name, stream in self._streams.items()}
        try:
            for name, stream in self._streams.items():
                if name in saved:
                    stream.may_differ = self.may_differ
                    stream.load_state_dict(saved[name])
        except ConfigError as error:
            for name, stream in self._streams.items():
                stream.load_state_dict(former[name])
            raise ConfigError(f"data.train.init_args.sources.{name}: {error}") from error
        is_same = state["shares"] == self._shares
        self._drawn = dict(state["drawn"]) if is_same else dict.fromkeys(self._streams, 0)
        if not is_same:
            rank_zero_warn(
                "data.train has other sources or weights than when the checkpoint was written: shares are counted from "
                "here on. Sources of both go on where they were; new ones begin."
            )


def warn_of_duplicates(prompts: Mapping[str, TrainingPrompts]) -> None:
    """Say how many prompts a source shares with one before it: they are drawn by both weights."""
    first_with: dict[tuple[int, ...], str] = {}
    for name, stream in prompts.items():
        shared = Counter(
            other
            for token_ids in {prompt.token_ids for prompt in stream.by_uid.values()}
            if (other := first_with.setdefault(token_ids, name)) != name
        )
        for other, count in shared.items():
            rank_zero_warn(
                f"data.train: {count} prompts of the source {name!r} are also in {other!r}, and are drawn by both "
                "weights."
            )
