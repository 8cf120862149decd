"""Whether prompts are those that a checkpoint was written with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lightning.pytorch.utilities import rank_zero_warn

from rlplug.errors import ConfigError

_CHANGES: Final = {
    "num_prompts": "the number of prompts (data.train, or what data.too_long leaves of it)",
    "uids": "the names or the order of the prompts (data.train)",
    "token_ids": "the tokens of the prompts (their text, data.chat, data.system_prompt or the tokenizer)",
    "shuffle": "data.shuffle",
    "seed": "data.seed",
}
"""Description of the change for each part of the fingerprint."""


def is_same(state: Mapping[str, Any], own: Mapping[str, Any], may_differ: bool) -> bool:
    """Return whether a position that ``PromptStream.state_dict`` saved is of prompts with the fingerprint ``own``.

    Raises:
        ConfigError: It is of others, or of another order, and they may not differ.
    """
    saved = state["fingerprint"]
    if not _CHANGES.keys() <= saved.keys():
        raise ConfigError(
            "The checkpoint was written with another kind of source in data.train, such as a mixture or one that "
            "streams: name that source again, or start a new run from its weights."
        )
    changed = [key for key in _CHANGES if saved[key] != own[key]]
    if changed:
        # name the first one, the cause: another number of prompts always changes the hashes too
        first = changed[0]
        values = "" if first in ("uids", "token_ids") else f": {saved[first]} then, {own[first]} now"
        what = f"What changed is {_CHANGES[first]}{values}."
        if not may_differ:
            raise ConfigError(
                f"The checkpoint cannot be resumed on these prompts. {what} Restore what the checkpoint was trained "
                "with, or begin a new pass over these: --run.allow_changes '[data]'."
            )
        rank_zero_warn(f"A new pass over the prompts begins: they are others than the checkpoint's. {what}")
    if saved["answers"] != own["answers"] and not changed:
        rank_zero_warn(
            "data.train has other answers or metadata than when the checkpoint was written: rewards use the new "
            "ones from here on."
        )
    if unused := sorted(state.keys() - {"epoch", "position", "fingerprint"}):
        rank_zero_warn(f"data.train does not use the checkpoint's {', '.join(unused)} any more: left out.")
    return not changed
