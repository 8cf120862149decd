"""A plugin that another process makes and asks once more, as another rank or a resumed run would."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Mapping
from typing import Any

from rlplug_devkit.other_process import Unavailable, call_elsewhere


def ask_elsewhere(checks: Any, method: str, timeout_s: float, is_fresh: bool = False) -> Any:
    """Return what a method of an object of the same test class returns in another process, or in a fresh one.

    That object gets what fixtures have set in this one and in its class, where it can be pickled.

    Raises:
        LookupError: The class is not a name of a module, or the method failed there without what fixtures have set
            here and cannot be sent.
        RuntimeError: It failed there otherwise; the message says how.
    """
    tests = type(checks)
    module = sys.modules[tests.__module__]
    names = [name for name, value in vars(module).items() if value is tests]
    if not names or not getattr(module, "__file__", None) or tests.__module__ == "__main__":
        raise LookupError(f"{tests.__qualname__} is no name of an importable module")
    own, of_class = _split(vars(checks)), _split(vars(tests))
    where = (sys.path, tests.__module__, module.__file__, names[0], method)
    try:
        return call_elsewhere(_answer, *where, own[0], of_class[0], timeout_s=timeout_s, is_fresh=is_fresh)
    except Unavailable as error:
        raise LookupError(str(error)) from error
    except RuntimeError as error:
        if lost := sorted(own[1] | of_class[1]):
            raise LookupError(f"another process cannot have {', '.join(lost)}, which fixtures set ({error})") from error
        raise


def _split(attributes: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the data among attributes that can be pickled, and the names of those that cannot."""
    kept, lost = {}, set()
    for name, value in attributes.items():
        if name.startswith("_") or name == "guard" or callable(value) or hasattr(value, "__get__"):
            continue
        try:
            kept[name] = pickle.loads(pickle.dumps(value))
        except Exception:  # noqa: BLE001 - whatever it raises, it says that it cannot
            lost.add(name)
    return kept, lost


def _answer(
    path: list[str], module: str, file: str, name: str, method: str, own: Mapping[str, Any], of_class: Mapping[str, Any]
) -> Any:
    sys.path[:] = path
    if module not in sys.modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:  # pytest's --import-mode=importlib
            spec = importlib.util.spec_from_file_location(module, file)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[module])
    tests = getattr(sys.modules[module], name)
    for key, value in of_class.items():
        setattr(tests, key, value)
    checks = tests()
    vars(checks).update(own)
    try:
        return getattr(checks, method)()
    except BaseException as error:  # that of pytest.fail is no Exception
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
