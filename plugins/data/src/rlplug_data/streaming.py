"""Training prompts that are read while they are drawn, in bounded memory, and resume exactly."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from rlplug.data.prompt_stream import TrainingPrompts, fingerprint
from rlplug.data.rows import PromptRow, check_row, of_part
from rlplug.data.sources import TrainingRows
from rlplug.errors import ConfigError, RunError, describe
from rlplug.types import Prompt

if TYPE_CHECKING:
    from rlplug.data.prompt_encoder import PromptEncoder

HEAD: Final = 16
"""Rows at the beginning that are read when a run starts, to know chat from text and whether the data are the same."""

Encode = Callable[[Sequence[PromptRow]], list[Prompt]]
"""Renders and tokenises rows, and leaves out or refuses those that are too long."""


class RowStream(ABC):
    """Rows of a source that is read pass by pass, with a place that can be saved."""

    shuffle_buffer: int = 1000
    """Rows in a block, in which the order is drawn anew."""

    @abstractmethod
    def begin(self, order: torch.Generator | None) -> None:
        """Begin a pass; with ``order``, its parts (files) may be read in another order, drawn from the generator."""

    @abstractmethod
    def read(self) -> PromptRow | None:
        """Return the next row, or ``None`` at the end of the pass, after which a pass begins before the next call."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the place as plain data: the next row is the one after those that were read."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place, in a pass that may not have begun here."""


class StreamedRows(TrainingRows):
    """Rows that are read while training; ``for_training`` of a source that streams returns them.

    Args:
        rows: The rows.
        key: Key of the source, for messages.
        name: Its name in a mixture.

    Raises:
        ConfigError: There are none, or they cannot be read.
    """

    def __init__(self, rows: RowStream, key: str, name: str = "") -> None:
        self._rows, self._key, self._name = rows, key, name
        self._head = read_head(rows, key)
        self.known = [of_part(row, name) for row in self._head]

    def prompts(self, encoder: PromptEncoder, shuffle: bool, seed: int | str) -> StreamedPrompts:
        limit, _ = encoder.limit()

        def encode(rows: Sequence[PromptRow]) -> list[Prompt]:
            prompts = encoder.encode(self._key, [of_part(row, self._name) for row in rows])
            if encoder.too_long == "refuse":
                return encoder.keep(self._key, prompts)
            return [prompt for prompt in prompts if len(prompt.token_ids) <= limit]

        encoder.check(self._key, encode(self._head))
        return StreamedPrompts(self._rows, self._head, encode, limit, shuffle, seed, self._key)


class StreamedPrompts(TrainingPrompts):
    """Training prompts of a source that is read block by block, epoch after epoch; every rank reads it for itself.

    A checkpoint has the place at which the block begins, and how many of its prompts were drawn: a resumed run reads
    the block again and goes on in it. It refuses a block with other prompts.

    Args:
        rows: The source.
        head: Its first rows, as :func:`read_head` returns them.
        encode: Makes prompts of rows.
        longest: Length that no prompt exceeds, in tokens.
        shuffle: Draw the order of files for each epoch, and that of rows within each block.
        seed: Seed of these orders.
        name: Key of the source, for messages.
    """

    def __init__(
        self,
        rows: RowStream,
        head: Sequence[PromptRow],
        encode: Encode,
        longest: int,
        shuffle: bool,
        seed: int | str,
        name: str = "data.train",
    ) -> None:
        self.epoch = 0
        """Epoch of the next prompt."""
        self._rows, self._encode, self._longest = rows, encode, longest
        self._shuffle, self._seed, self._name = shuffle, seed, name
        self._num_read = self._num_left_out = self._position = 0
        self._block: list[Prompt] = []
        self._start: dict[str, Any] = {}
        self._block_hash: dict[str, Any] = {}
        self._is_begun = self._is_last = False  # a pass, and the block is the last of it
        options = {"shuffle_buffer": rows.shuffle_buffer if shuffle else None, "seed": seed if shuffle else None}
        self._fingerprint = {"streamed_head": fingerprint(encode(head)), **options}

    @property
    def num_prompts(self) -> None:
        return None

    @property
    def longest_prompt(self) -> int:
        return self._longest

    @property
    def by_uid(self) -> Mapping[str, Prompt]:
        """Nothing: prompts that were drawn are not kept."""
        return {}

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next ``num_prompts`` prompts.

        Raises:
            ConfigError: A row cannot be used.
            RunError: The source cannot be read on.
        """
        taken: list[Prompt] = []
        while len(taken) < num_prompts:
            self._fill()
            part = self._block[self._position : self._position + num_prompts - len(taken)]
            self._position += len(part)
            taken += part
        return taken

    def metrics(self) -> dict[str, float]:
        """Return the epoch, rows read so far, and prompts left out as too long so far."""
        return {
            "data/epoch": float(self.epoch),
            "data/num_read": float(self._num_read),
            "data/num_too_long": float(self._num_left_out),
        }

    def _fill(self) -> None:
        """Read the next block with a prompt in it, when all of this one are drawn."""
        num_ends = 0
        while self._position >= len(self._block):
            if self._is_last:
                self.epoch, self._is_begun, num_ends = self.epoch + 1, False, num_ends + 1
            if num_ends > 1:
                raise RunError(f"{self._name}: a whole pass has no prompt that is short enough: see data.too_long.")
            if not self._is_begun:
                self._rows.begin(self._generator("files"))
                self._is_begun = True
            self._read_block()

    def _read_block(self) -> None:
        self._start = {
            "epoch": self.epoch,
            "rows": self._rows.state_dict(),
            "num_read": self._num_read,
            "num_left_out": self._num_left_out,
        }
        rows = read_rows(self._rows, self._rows.shuffle_buffer, self._name)
        self._is_last = len(rows) < self._rows.shuffle_buffer
        prompts = self._encode(rows) if rows else []
        if self._shuffle and prompts:
            order = torch.randperm(len(prompts), generator=self._generator(str(self._num_read)))
            prompts = [prompts[index] for index in order.tolist()]
        self._block, self._position = prompts, 0
        self._block_hash = fingerprint(prompts)
        self._num_read += len(rows)
        self._num_left_out += len(rows) - len(prompts)

    def _generator(self, what: str) -> torch.Generator | None:
        if not self._shuffle:
            return None
        digest = hashlib.sha256(f"{self._seed}:{self.epoch}:{what}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))

    def state_dict(self) -> dict[str, Any]:
        """Return where the block of the next prompt begins, and how many of it were drawn."""
        self._fill()
        return {
            "start": dict(self._start),
            "position": self._position,
            "block": dict(self._block_hash),
            "fingerprint": dict(self._fingerprint),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved position, and read its block again.

        Raises:
            ConfigError: The source has other prompts, at its beginning or in that block, or another order.
        """
        changed = sorted(
            key for key, value in self._fingerprint.items() if state["fingerprint"].get(key, "absent") != value
        )
        if changed:
            what = "its first rows, or their text or tokenizer" if "streamed_head" in changed else ", ".join(changed)
            raise ConfigError(
                f"The checkpoint cannot be resumed on these prompts. What changed of {self._name} is {what}. Restore "
                "what the checkpoint was trained with, or start a new run from its weights."
            )
        former = self.state_dict()
        try:
            self._go_to(state)
        except ConfigError:
            self._go_to(former)
            raise

    def _go_to(self, state: Mapping[str, Any]) -> None:
        start = state["start"]
        self._rows.load_state_dict(start["rows"])
        self.epoch, self._num_read, self._num_left_out = start["epoch"], start["num_read"], start["num_left_out"]
        self._is_begun = True
        self._read_block()
        changed = [key for key in ("num_prompts", "uids", "token_ids") if self._block_hash[key] != state["block"][key]]
        if changed:
            raise ConfigError(
                f"The checkpoint cannot be resumed: {self._name} has other prompts at its place ({changed[0]} differ). "
                "Restore what the checkpoint was trained with, or start a new run from its weights."
            )
        self._position = state["position"]


def read_rows(rows: RowStream, most: int, name: str) -> list[PromptRow]:
    """Return the next rows, at most ``most``; fewer at the end of a pass.

    Args:
        name: Key of the source, for messages.

    Raises:
        ConfigError: A row cannot be used.
        RunError: The source cannot be read on.
    """
    found: list[PromptRow] = []
    try:
        while len(found) < most and (row := rows.read()) is not None:
            found.append(check_row(row))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    except Exception as error:  # network, files or libraries may raise anything
        after = f"after the row {found[-1].uid!r}" if found else "at the first row of a block"
        raise RunError(
            f"{name} cannot be read {after}: {describe(error)}. Resume when it can be read again."
        ) from error
    return found


def read_head(rows: RowStream, name: str) -> list[PromptRow]:
    """Return the first rows in the order of the files; the next pass has to begin anew.

    Raises:
        ConfigError: There are none, or they cannot be read.
    """
    try:
        rows.begin(None)
        head = read_rows(rows, HEAD, name)
    except RunError as error:
        raise ConfigError(str(error)) from error
    if not head:
        raise ConfigError(f"{name}: the source has no prompts: give it at least one.")
    return head
