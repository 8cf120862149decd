"""What jsonargparse carries over where a later file or option replaces a class or a list: only what was written.

Without this, ``GRPO`` in place of ``DAPO`` clips at 0.28, and the first reward of a list has the weight of another.
"""

from typing import Any, Final

from jsonargparse import Namespace, _typehints

KEY_DEFAULTS: Final[list[dict[str, Any]]] = []
"""Defaults of keys, with class_path and init_args, which are not the defaults of their classes."""

_library: Final[Any] = _typehints
_discard: Final = _library.discard_init_args_on_class_path_change
_adapt: Final = _library.adapt_typehints


def _without_defaults(parser_or_action: Any, before: Any, value: Any) -> None:
    """Take defaults and what the new class does not know from the arguments of the class ``before``."""
    if isinstance(before, Namespace) and before.get("init_args") and before.class_path not in (None, value.class_path):
        own = _library.ActionTypeHint.get_class_parser(before.class_path).get_defaults()
        known = [own, *(each["init_args"] for each in KEY_DEFAULTS if each["class_path"] == before.class_path)]
        for name, argument in list(before.init_args.items(branches=True, nested=False)):
            if any(argument == defaults.get(name) for defaults in known):
                before.init_args.pop(name)
    _discard(parser_or_action, before, value)


def _without_positions(value: Any, *args: Any, **options: Any) -> Any:
    """Adapt a value; a list that replaces another has nothing of the elements at the same positions."""
    if isinstance(value, list) and isinstance(options.get("prev_val"), list) and not options.get("append"):
        options["prev_val"] = None
    return _adapt(value, *args, **options)


_library.discard_init_args_on_class_path_change = _without_defaults
_library.adapt_typehints = _without_positions
