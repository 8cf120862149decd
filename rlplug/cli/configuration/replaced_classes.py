"""What jsonargparse carries over where a later file or option replaces a class or a list: only what was written.

Without this, ``GRPO`` in place of ``DAPO`` clips at 0.28, and the first reward of a list has the weight of another.
"""

from collections.abc import Iterator
from typing import Any, Final

from jsonargparse import Namespace, _typehints

KEY_DEFAULTS: Final[list[dict[str, Any]]] = []
"""Defaults of keys, with class_path and init_args, which are not the defaults of their classes."""

FILES: Final[list[Any]] = []
"""What each configuration file has."""

_library: Final[Any] = _typehints
_discard: Final = _library.discard_init_args_on_class_path_change
_adapt: Final = _library.adapt_typehints


def _without_defaults(parser_or_action: Any, before: Any, value: Any) -> None:
    """Take defaults and what the new class does not know from the arguments of the class ``before``."""
    if isinstance(before, Namespace) and before.get("init_args") and before.class_path not in (None, value.class_path):
        own = _library.ActionTypeHint.get_class_parser(before.class_path).get_defaults()
        every = {name for name, default in vars(own).items() if default is not None}
        written = {name for each in _given(FILES, before.class_path.rpartition(".")[2], every) for name in each}
        known = [own, *(each["init_args"] for each in KEY_DEFAULTS if each["class_path"] == before.class_path)]
        for name, argument in list(before.init_args.items(branches=True, nested=False)):
            if name not in written and any(argument == defaults.get(name) for defaults in known):
                before.init_args.pop(name)
    _discard(parser_or_action, before, value)


def _given(block: Any, name: str, every: set[str]) -> Iterator[Any]:
    """Yield the options that files give a class, but where ``every`` one is there, as in a configuration of a run."""
    if isinstance(block, dict) and str(block.get("class_path")).rpartition(".")[2] == name:
        options = block.get("init_args")
        yield from [options] if isinstance(options, dict) and not every <= {*options} else []
    for each in block.values() if isinstance(block, dict) else block if isinstance(block, list) else ():
        yield from _given(each, name, every)


def _without_positions(value: Any, *args: Any, **options: Any) -> Any:
    """Adapt a value; a list that replaces another has nothing of the elements at the same positions."""
    if isinstance(value, list) and isinstance(options.get("prev_val"), list) and not options.get("append"):
        options["prev_val"] = None
    return _adapt(value, *args, **options)


_library.discard_init_args_on_class_path_change = _without_defaults
_library.adapt_typehints = _without_positions
