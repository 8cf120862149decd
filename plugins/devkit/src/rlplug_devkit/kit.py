"""``Kit``, the base class of all kits: a subclass replaces none of their checks, and is excused from some by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, ClassVar, Final

import pytest

from rlplug.errors import ConfigError, describe

EXCUSED: Final = "excused by its author: "
"""How the reason of a check begins that was not run because ``excused`` names it."""


class Kit:
    """Base class of kits.

    Attributes:
        excused: Reasons, by the names of checks that do not fit the plugin. These are not run; pytest's summary and
            ``rlplug check`` list them as skipped.
    """

    excused: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a subclass that replaces a check, or that is excused from one without a reason.

        Raises:
            TypeError: The message names the check.
        """
        super().__init_subclass__(**options)
        checks = checks_of(cls)
        for name, check in checks.items():
            found = inspect.getattr_static(cls, name)
            if getattr(found, "__code__", None) is not check.__code__:
                raise TypeError(
                    f"{cls.__name__} replaces the kit's check {name}: give it another name, or say why the check does "
                    f"not fit, as in excused = {{{name!r}: 'why'}}."
                )
        for name, reason in cls.excused.items():
            if name not in checks or not isinstance(reason, str) or not reason.strip():
                raise TypeError(f"{cls.__name__}.excused has {name!r}: give a check of the kit, and a reason.")


def checks_of(tests: type) -> dict[str, FunctionType]:
    """Return the checks that a test class has of its kit, by name."""
    checks: dict[str, FunctionType] = {}
    for base in tests.__mro__:
        room = base.__module__.removeprefix("rlplug_devkit.")
        is_of_kit = room != base.__module__ and not room.startswith("check.")  # whose classes are of settings
        for name, value in vars(base).items() if is_of_kit else ():
            if name.startswith("test_") and isinstance(value, FunctionType):
                checks.setdefault(name, value)
    return checks


def marked(check: Callable[..., None], *marks: pytest.MarkDecorator) -> Callable[..., None]:
    """Return a check with marks of pytest's, for a test class of its kit."""
    assert isinstance(check, FunctionType)
    copied = FunctionType(check.__code__, check.__globals__, check.__name__, check.__defaults__, check.__closure__)
    copied.__dict__.update(check.__dict__)
    copied.__module__, copied.__doc__ = check.__module__, check.__doc__
    copied.__kwdefaults__, copied.__annotations__ = check.__kwdefaults__, check.__annotations__
    for mark in marks:
        mark(copied)
    return copied


def check_refused(name: str, attempt: Callable[..., object], *arguments: Any, taken: str = "is taken") -> None:
    """Fail unless ``attempt`` of the arguments raises a ``ConfigError`` that names what is wrong.

    Args:
        name: What is wrong, as the message has to name it.
        attempt: Makes or prepares a plugin with it.
        arguments: Of ``attempt``.
        taken: What has happened where nothing was raised.
    """
    try:
        attempt(*arguments)
    except ConfigError as error:
        if name not in str(error):
            pytest.fail(f"a wrong {name} is refused with {str(error)!r}: name it.", pytrace=False)
        return
    except Exception as error:  # noqa: BLE001 - whichever it is, it is the wrong one
        pytest.fail(f"a wrong {name} raised {describe(error)}. Raise a ConfigError.", pytrace=False)
    pytest.fail(f"a wrong {name} {taken}: raise a ConfigError that names it.", pytrace=False)
