"""Writes docs/hooks.md: every hook with its arguments, since which version it is there, and what is deprecated.

``python scripts/write_hook_reference.py`` (or ``make docs``) writes it; ``--check`` writes nothing and exits with 1
when the page is not what ``rlplug/hookspecs.py`` says.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, Final

from distributions import ROOT
from written_files import write_or_check

from rlplug import hookspecs
from rlplug.plugin_checks import REGISTRATION_PREFIX

PAGE: Final = ROOT / "docs" / "hooks.md"
HEAD: Final = """# Hooks

<!-- Written by scripts/write_hook_reference.py: change rlplug/hookspecs.py, then run `make docs`. -->

The hook API is {version}. A plugin declares the versions that it was written for, such as `RLPLUG_API_VERSION =
"{range}"`; a run refuses a plugin whose range does not include {version}. The second number rises when a hook or
an argument is added, the first when one changes its meaning. Within 3.x no hook and no argument is removed,
renamed or given another type, and `tests/unit/test_hookspecs.py` keeps their signatures. A hook that will go is
deprecated first: it stays until 4.0, and a plugin that implements it gets a warning that names the one to use
instead.

A hook is a function of a given name, marked `@hookimpl`, in the module behind the plugin's entry point. Arguments
are passed by keyword: take only those that you use. [Writing a plugin](writing-a-plugin.md#all-hooks) has the four
forms, and an example of each.

| hook | form | since | deprecated |
|---|---|---|---|
"""
MEANING_CHANGES: Final = """
## What else changed

| version | change |
|---|---|
| 3.1 | resolvers for what were parts of the core: `RolloutSource` with `make_step_training`, \
`MemoryDecisions` and `GPU`, `TokenLog` and `TokenLogOptions`, `ExperimentLog`, and the profiler of a few steps |
| 3.0 | losses and advantages are of the K tokens that train, end to end: a `Batch` [K] in place of a padded one, \
`Advantages.of_sequences`, `of_tokens` and `trains`, `StepBatch.tokens`, `with_advantages` and `select`; \
`rlplug.ops` has no masked sums |
| 2.2 | the registry takes a class by its place, `package.module:Class`; new: `RunObserver`, `ObservedRun`, \
`StepRecord`, `Validation` and `ProfiledSteps` |
| 2.1 | new, each with a default that leaves a plugin as it was: `Algorithm.streamed_divisor`; `LossOutput.per_token`; \
`Prompt.source` and `messages`, `PromptRow.source`, `PromptSource.stream`; \
`Reward.compares_group`, `deadline_s`, `place`, `device_bytes` and `pop_counts`; \
`RolloutEngine.scrape_targets` and `compile_cache_variables`; \
`EngineCapabilities.adapters` and `PolicySpec.adapters` |
| 2.0 | ranks see their own completions: a `StepBatch` and a `Rollout`; means of `rlplug_after_rollout` are averaged |
| 1.3 | tokens of a `Sample` or `Completion` are read-only NumPy arrays; lists and tuples are accepted at its making |
"""


def hooks() -> dict[str, Callable[..., Any]]:
    """Return the specifications by name, in the order of the file."""
    return {name: hook for name, hook in vars(hookspecs).items() if name.startswith("rlplug_")}


def form_of(name: str, hook: Callable[..., Any]) -> str:
    """Return which of the four forms a hook has."""
    if name.startswith(REGISTRATION_PREFIX):
        return "registration"
    if name in hookspecs.WRAPPER_ONLY:
        return "wrapper"
    return "resolver" if hook.rlplug_spec["firstresult"] else "observation"  # type: ignore[attr-defined]


def page() -> str:
    """Return the text of the page."""
    newest = hookspecs.API_VERSION
    lines = [HEAD.format(version=newest, range=f">={newest},<{int(newest.partition('.')[0]) + 1}").rstrip("\n")]
    for name, hook in hooks().items():
        deprecated = hookspecs.DEPRECATED.get(name, "no")
        lines.append(f"| [`{name}`](#{name}) | {form_of(name, hook)} | {hookspecs.SINCE[name]} | {deprecated} |")
    for name, hook in hooks().items():
        lines += ["", f"## {name}", "", *_section(name, hook)]
    return "\n".join(lines) + "\n" + MEANING_CHANGES


def _section(name: str, hook: Callable[..., Any]) -> list[str]:
    """Return the lines of a hook: its docstring, arguments and result."""
    signature = inspect.signature(hook)
    text = inspect.getdoc(hook) or ""
    arguments = [f"`{argument.name}: {argument.annotation}`" for argument in signature.parameters.values()]
    returns = str(signature.return_annotation)
    if name in hookspecs.WRAPPER_ONLY:  # the core's result comes first; a wrapper is a generator that returns another
        returns = returns.partition(" | Generator")[0]
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    return [text, "", f"- takes {', '.join(arguments) or 'no arguments'}", f"- returns `{returns}`"]


def main() -> int:
    return write_or_check(__doc__, PAGE, lambda _: page())


if __name__ == "__main__":
    sys.exit(main())
