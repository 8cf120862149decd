"""What is wrong with a value of the configuration, in words of its key, from what jsonargparse says."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, get_type_hints

from rlplug.cli.configuration.early_checks import hint, unknown_key
from rlplug.config import RunConfig
from rlplug.data.sources import PromptSource
from rlplug.errors import ConfigError, RLPlugError, causes_of, describe, did_you_mean, shorten
from rlplug.interfaces.checks.calls import failed_call
from rlplug.interfaces.memory_plan import out_of_memory
from rlplug.plugin_manager import plugins
from rlplug.plugin_names import distribution_of
from rlplug.registry import kind_of_key

_UNKNOWN_CLASS: Final = re.compile(r"Expected (?:a )?dot import path string: ?(.*)")
_NOISE: Final = re.compile(
    r"\s*(?:Does not validate against|Subtypes: |Errors:|Given value|- Expected a path but|- Does not validate"
    r"|- a class path \(str\)|- a dict |Subclass types expect)"
)
_INSIDE: Final = re.compile(r"[A-Za-z_][\w.]*(?: is |: )|there is no (?:option|key) |the configuration lacks ")
"""Start of a message of the parser of a class's options, which this one passes on."""
_GOT: Final = re.compile(r"(Expected a .*?|Not a valid subclass of \w+)\.? Got value: ?(.*)")
_EXPECTED: Final = re.compile(r"Expected (?:a )?(?:<class '([^']+)'>|typing\.(.+)|(.+))|Not a valid subclass of (\S+)")
_CLASS_PATH: Final = re.compile(r"class_path'?[ =:]+'([^']+)'")
_BESIDE_CLASS: Final = "options stand beside class_path: put them in a block, init_args."
_PROBLEM: Final = re.compile(r"Problem with given class_path '([^']+)':\s*\n\s*(.+)")
_CALLABLE: Final = re.compile(r"Type .* expects a function or a callable class: (.+?)(?:\. Got value: .*)?$")
_TYPE_WORDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a block",
    "NoneType": "null",
}
_NO_DEVICE_TEXT: Final = re.compile("No supported gpu backend|can not run on your system")
_NO_DEVICE: Final = (
    "trainer.accelerator asks for a device that torch does not find here: set it to cpu, or see why with rlplug doctor."
)
_WRONG_CLASS: Final = re.compile(
    r"(?:Import path |.*Expected '|\")([^\s'\"]+)(?: does not correspond to|' to be|\" is not) "
    r"a (subclass of|function that returns) (.+?)\.*(?: Got value: .*)?$"
)
_NO_CONFIG: Final = re.compile(r"Unable to load config ('[^{\[].*?')")
_EXAMPLES: Final = {
    "optimizer": "torch.optim.AdamW",
    "lr_scheduler": "torch.optim.lr_scheduler.CosineAnnealingLR",
    "logger": "lightning.pytorch.loggers.WandbLogger",
}
"""Classes of other libraries, by the last name of a key."""
_ABSTRACT: Final = re.compile(r"Expected an instantiatable class, but (\S+) is abstract")

MAX_LENGTH: Final = 800
"""Longest message of the parser, in characters."""
_UNKNOWN_KEY: Final = re.compile(r"does not accept option '([^']+)'|unrecognized arguments: (?:--)?([^\s=]+)")
_UNKNOWN_WORD: Final = re.compile(r"unrecognized arguments: ([^\s-]\S*)")
_UNKNOWN_OPTION: Final = re.compile(r"^Option '([^']+)' is not accepted")
_NO_SUBCLASS: Final = re.compile(r"Subclasses are disabled for (\w+), thus '([^']+)'")
_NO_VALUE: Final = re.compile(r"argument (?:\S+/)?(--\S+): expected (?:one|at least one) argument")
_MISSING: Final = re.compile(r"arguments are required: (.+)")


def explain_error(message: str, ex: Exception | None, keys: Callable[[], list[str]], command: str) -> str:
    """Return an error of the parser in words of its key.

    Args:
        message: What jsonargparse says.
        ex: What it raised, if it did.
        keys: Returns every key of the parser.
        command: The command, such as ``fit``.
    """
    key, body = _split_key(message)
    if (problem := explain_import(ex)) is not None:
        return _cut(problem if key is None else f"{key}: {problem}")
    if found := _MISSING.search(message):
        lacking = " and ".join(re.sub(r"\b(?:fit|validate)\.", "", found[1]).split(", "))
        example = " configs/quickstart.yaml is a complete configuration." if "." in lacking else ""
        return f"the configuration lacks {lacking}: set it.{example}"
    if key is None and (found := _UNKNOWN_WORD.search(message)) and (fix := _explain_word(found[1], keys(), command)):
        return fix
    if key is None and (found := _UNKNOWN_KEY.search(message)):
        return unknown_key(next(filter(None, found.groups())), keys())
    if key is None and (found := _UNKNOWN_OPTION.search(message)):
        options = [name for name in keys() if name != "config" and not name.endswith("help")]
        known = "All keys: rlplug fit --help=all" if "model" in options else f"Options: {', '.join(options)}."
        return f"there is no option {found[1]!r}.{hint(found[1], options)} {known}"
    if found := _NO_VALUE.match(message):
        return f"{found[1]} has no value: write one behind it."
    if found := _NO_SUBCLASS.search(message):
        blocks = [f"model.{name}" for name, each in get_type_hints(RunConfig).items() if found[1] in str(each)]
        return f"{' or '.join(blocks) or found[1]} has the class_path {found[2]!r}: give its options alone."
    if message.startswith(("Invalid option", "unrecognized arguments")):
        return f"{_cut(message.strip().rstrip(': '))}: drop or correct it, as rlplug {command} --help says."
    return _cut(" ".join(message.split()) if key is None else explain_value(key, body))


def _explain_word(word: str, keys: Sequence[str], command: str) -> str | None:
    """Return what to write for a word without ``--``, or ``None`` where it is neither key nor configuration."""
    name, equals, value = word.lstrip("+").partition("=")
    depth = max(1, name.count("."))
    parents = [name.rsplit(".", number)[0] for number in range(depth)]  # a class's options have its key
    if equals and not {*parents}.isdisjoint(keys):
        return f"write --{name} {'VALUE' if value[:1] in tuple('[{') else value}: keys begin with --."
    if word.endswith((".yaml", ".yml")) or os.path.isfile(word):
        return f"give the configuration {word} with -c, as in: rlplug {command} -c {word}"
    return None


def _cut(text: str) -> str:
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 100]} ... {text[-80:]}"


def _split_key(message: str) -> tuple[str | None, list[str]]:
    """Return the key that jsonargparse's message is about, and its other lines."""
    found = re.match(r'Parser key "([^"]+)":|--(\S+)\.help:', message)
    if found is None:
        return None, []
    return found[1] or found[2], [line for line in message[found.end() :].splitlines() if line.strip()]


def explain_failure(error: Exception) -> tuple[str, bool]:
    """Return whose an unexpected error is, and whether its traceback is wanted: a lack of memory is nobody's bug."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if "callback" in frame.f_locals]
    kinds = [type(frame.f_locals["callback"]) for frame in frames if frame.f_code.co_name == "_call_callback_hooks"]
    given = [f"the callback {kind.__name__}" for kind in kinds if not kind.__module__.startswith("rlplug")]
    call, problem = failed_call(error) or next(iter(given), None), describe(error, with_line=True)
    if (cause := out_of_memory(error)) is not None:
        text = " ".join(describe(cause).split()).partition(": ")[2]
        notes = getattr(error, "__notes__", ())  # they have the numbers that follow
        text = text.partition(" GPU ")[0] if notes else f"{text} (rlplug --debug shows the traceback)"
        place = _place_of(cause) + ("" if call is None else f", in a call of {call}")
        return "\n".join([f"out of memory, allocated in {place}: {text}", *notes]), False
    if call is None and isinstance(error, OSError) and error.filename is not None:
        return f"{problem}. Mend that place, or give another (rlplug --debug shows the traceback)", False
    if call is None:
        return f"{problem}: an error of rlplug, or of a library that it calls. Its traceback:", True
    return f"{call} raised {problem}. Its traceback:", True


def _place_of(error: BaseException) -> str:
    """Return file, line and function that raised an error, outside of torch."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not re.search(r"/site-packages/(torch|lightning)/", frame.filename)] or frames
    return "".join(f"{Path(f.filename).name}:{f.lineno} ({f.name})" for f in own[-1:]) or "an unknown place"


def explain_value(key: str, lines: list[str]) -> str:
    """Return what is wrong with the value of ``key``.

    jsonargparse tries each type of a union, and lists why each refused the value. The reason to tell is that of the
    type which the user meant: the one that accepted the value's form and found a fault inside, as the parser of its
    options says.
    """
    given = next((line.split(":", 1)[1].strip() for line in lines if line.lstrip().startswith("Given value:")), None)
    reasons = [re.sub(r"^\s*- ", "", line).strip() for line in lines if not _NOISE.match(line)]
    inside = [reason for reason in reasons if _INSIDE.match(reason)]
    if inside:
        return _explain_inside(key, inside[0], given)
    for reason in reasons:
        if found := _NO_CONFIG.search(reason):
            return f"{key} is {found[1]}: give a block of options. A space follows the colon of each."
        if problem := explain_wrong_class(reason):
            kind = kind_of_key(key) if _ABSTRACT.match(reason) else None
            known = f" Or set class_path to {' or '.join(plugins().registry.names(kind))}." if kind else ""
            return f"{key}: {problem}{known}"
        if "object has no attribute 'keys'" in reason and (found := _CLASS_PATH.search(" ".join(lines))):
            name = found[1].rpartition(".")[2]
            return f"{key}: {name} takes its options as a block under init_args: rlplug fit --{key}.help {name}"
    named = [found[1] for reason in reasons if (found := _UNKNOWN_CLASS.match(reason))]
    if named and (explained := _explain_class(key, named[0])):
        example = _EXAMPLES.get(key.rpartition(".")[2], "package.Class")
        give = "Give" if explained.endswith("is not a known class.") else "Or give"
        return f"{key}: {explained} {give} an import path, such as {example}."
    for reason in reasons:
        if found := _CALLABLE.match(reason):
            if "Dict must include" in found[1]:
                return f"{key}: {_BESIDE_CLASS}"
            return f"{key}: it takes the import path of a function or class, package.Class ({found[1]})."
        if found := _GOT.match(reason):
            reasons, given = [found[1]], found[2]
    others = [reason for reason in reasons if not _UNKNOWN_CLASS.match(reason)]
    types = [_type_words(found) for reason in others if (found := _EXPECTED.match(reason))]
    if types and given is not None:
        return f"{key} is {given[:80] or 'empty'}: give {' or '.join(dict.fromkeys(types))}."
    value = "" if given is None else f" (it is {given[:80]})"
    return f"{key}: {' '.join(' '.join(dict.fromkeys(reasons)).split()).rstrip('.')}{value}. Correct it."


def _explain_inside(key: str, reason: str, given: str | None) -> str:
    """Return what the parser of a class's options said, with the key of the class before that of the option."""
    if reason.startswith("there is no option 'class_path'"):
        return f"{key}: {_BESIDE_CLASS}"
    if reason.startswith(("there is no option ", "there is no key ")):
        return f"{key}: {reason}"
    if reason.startswith("the configuration lacks "):
        return f"{key}: it lacks {reason.removeprefix('the configuration lacks ')}"
    has_class = given is None or re.match(r"\W*class_path\b", given) is not None
    return f"{key}.init_args.{reason}" if has_class else f"{key}.{reason}"


def _type_words(found: re.Match[str]) -> str:
    """Return the words for a type that jsonargparse expected."""
    name, typing_name, other, subclass = found.groups()
    if subclass is not None:
        return f"a block with the class_path of a{'n' * (subclass[0] in 'AEIO')} {subclass}, or its options"
    if typing_name is not None:
        return re.sub(r"^Literal\[(.*)\]", lambda literal: literal[1].replace(", ", " or "), typing_name)
    return _TYPE_WORDS.get(name, name) if name is not None else str(other)


def _explain_class(key: str, name: str) -> str | None:
    """Return what is wrong with the name of a class, or ``None`` where no class is meant."""
    if kind := kind_of_key(key):
        return plugins().registry.explain_unknown(kind, name)
    if key.rpartition(".")[2] in ("lr", "betas"):  # numbers, or tensors, which no YAML holds
        return None
    if distribution := distribution_of("classes", name):
        return f"{name!r} comes with {plugins().registry.how_to_get(distribution)}"
    known = set(plugins().registry.names("classes"))
    if key.startswith(("data.train", "data.val")):
        known |= {source.__name__ for source in PromptSource.__subclasses__()}
    return f"{shorten(name)} is not a known class.{did_you_mean(name, known)}"


def explain_import(error: BaseException | None) -> str | None:
    """Return which import path could not be imported and why, or ``None`` where no import failed.

    Args:
        error: What jsonargparse raised; the exception of the import is among its causes.
    """
    for cause in causes_of(error):
        if isinstance(cause, ConfigError):  # of the parser of a class's options, which has explained it
            return None
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            if frame.f_code.co_name == "import_object":  # jsonargparse's, whose messages leave the path out
                path = frame.f_locals.get("name")
                return _explain_path(path, cause, frame) if isinstance(path, str) and "." in path else None
    return None


def explain_wrong_class(reason: str) -> str | None:
    """Return what is wrong with a class that was imported, or ``None`` where jsonargparse's ``reason`` is another."""
    if found := _ABSTRACT.match(reason):
        return f"{found[1]!r} is abstract: give the import path of a subclass."
    if found := _WRONG_CLASS.match(reason):
        wanted = re.sub(r"Union\[(.*)\]", lambda union: union[1].replace(", ", " or "), found[3])
        wanted = re.sub(r"<class '([^']+)'>", r"\1", wanted)
        return f"{found[1]!r} is no {found[2]} {wanted}: give the import path of one."
    return None


def _explain_path(path: str, cause: BaseException, importer: FrameType) -> str:
    if not all(part.isidentifier() for part in path.split(".")):
        return f"{path!r} is no import path: give package.Class."
    name = path.rpartition(".")[2]
    if path.startswith("rlplug.") and (distribution := distribution_of("classes", name)) is not None:
        return f"{path!r} has moved: write {name} alone, which {distribution} brings (pip install {distribution})."
    context = cause.__context__
    if isinstance(cause, AttributeError) and isinstance(context, ModuleNotFoundError) and not _is_of(path, context):
        cause = context  # package.module exists, and imports a module that does not
    return f"{path!r} cannot be imported: {_reason(path, cause, importer)}"


def _reason(path: str, cause: BaseException, importer: FrameType) -> str:
    """Return why the import of ``path`` raised ``cause``, and what to do."""
    if isinstance(cause, ModuleNotFoundError) and _is_of(path, cause):
        return f"there is no module {cause.name!r}. Correct the path, install it, or run rlplug in its folder."
    if isinstance(cause, SyntaxError):
        return f"{os.path.basename(cause.filename or '')}:{cause.lineno}: {cause.msg}. Correct the file."
    *_, (last, _) = traceback.walk_tb(cause.__traceback__)
    if isinstance(cause, AttributeError) and (last is importer or last.f_code.co_name == "__getattr__"):
        owner = getattr(cause.obj, "__name__", path.rpartition(".")[0])
        near = did_you_mean(str(cause.name), getattr(cause.obj, "__all__", dir(cause.obj)))
        return f"{owner} has no {cause.name!r}.{near or ' Correct the name.'}"
    fix = "Install what it imports" if isinstance(cause, ModuleNotFoundError) else "Correct the module"
    return f"its module raises {' '.join(describe(cause, with_line=True).split())}. {fix}."


def _is_of(path: str, missing: ModuleNotFoundError) -> bool:
    """Return whether the module that is missing is the one of ``path``, or a package that holds it."""
    return f"{path}.".startswith(f"{missing.name}.")


def explain_constructor(error: Exception) -> RLPlugError:
    """Return what the constructor of a configured class raised as a message: its own, or one that names the class."""
    causes = list(causes_of(error))
    if own := next((cause for cause in causes if isinstance(cause, RLPlugError)), None):
        return own
    if (problem := explain_import(error)) is not None:
        return ConfigError(problem)
    cause = causes[-1]
    made, text = _made_by(cause), " ".join(str(cause).split())[:500] or type(cause).__name__
    if found := _PROBLEM.findall(str(causes[0])):  # of a list the last cause is that the list is no class
        made, text = found[-1][0].rpartition(".")[2], found[-1][1].strip()[:500]
    if made in ("Trainer", "_AcceleratorConnector"):
        return ConfigError(_NO_DEVICE if _NO_DEVICE_TEXT.search(text) else f"trainer: {text} Correct it.")
    key = _key_made(causes[0]) or {"Timer": "trainer.max_time", "XLAAccelerator": "trainer.accelerator"}.get(made or "")
    parts = filter(None, (key, made and f"{made} refuses its options", text))
    return ConfigError(f"{': '.join(parts)}. Correct it (rlplug --debug fit shows where).")


def _key_made(error: BaseException) -> str | None:
    """Return the key whose class jsonargparse was making when it raised ``error``."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "instantiate"]
    return getattr(frames[-1].f_locals.get("component"), "dest", None) if frames else None


def _made_by(error: BaseException) -> str | None:
    """Return the class in whose constructor an exception was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    owners = [frame.f_locals.get("self") for frame in frames if frame.f_code.co_name in ("__init__", "__post_init__")]
    return type(owners[-1]).__name__ if owners else None
