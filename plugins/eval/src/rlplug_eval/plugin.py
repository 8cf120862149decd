"""The entry point: a run's exported policy gets a model card."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplug.plugin_manager import hookimpl

if TYPE_CHECKING:
    from rlplug.interfaces import RunObserver

RLPLUG_API_VERSION = ">=3,<4"


@hookimpl
def rlplug_make_observer() -> RunObserver:
    from rlplug_eval.card_writer import CardWriter

    return CardWriter()
