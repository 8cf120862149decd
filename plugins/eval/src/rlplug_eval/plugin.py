"""The entry point: a run's exported policy gets a model card."""

from rlplug.interfaces import RunObserver
from rlplug.plugin_manager import hookimpl
from rlplug_eval.card_writer import CardWriter

RLPLUG_API_VERSION = ">=3,<4"


@hookimpl
def rlplug_make_observer() -> RunObserver:
    return CardWriter()
