"""The entry point: sources of groups that keep some of them between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplug.plugin_manager import hookimpl

if TYPE_CHECKING:
    from rlplug.config import RunConfig
    from rlplug.rollout.source import RolloutSource

RLPLUG_API_VERSION = ">=3.1,<4"


@hookimpl
def rlplug_make_source(config: RunConfig) -> RolloutSource | None:
    options, prompts_per_step = config.partial_rollout, config.batch.prompts_per_step
    if options is None:
        return None
    from rlplug_async.option_checks import check_options

    check_options(options)
    if options.asynchronous:
        from rlplug_async.asynchronous import AsynchronousSource

        return AsynchronousSource(options, prompts_per_step)
    from rlplug_async.source import PartialSource

    return PartialSource(options, prompts_per_step)
