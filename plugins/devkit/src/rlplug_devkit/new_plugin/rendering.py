"""Files of a new plugin: the templates of all kinds and of one kind, with the plugin's names filled in."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any, Final

import jinja2
from packaging.version import Version

from rlplug.errors import ConfigError
from rlplug_devkit.new_plugin.kinds import KINDS

SUFFIX: Final = ".j2"
"""Ending of a template's file; other files are copied."""
LONGEST_NAME: Final = 40


@dataclass(frozen=True)
class Names:
    """Names of a plugin, which all follow from one."""

    name: str
    """The plugin's, such as ``my-reward``: its entry point's."""
    distribution: str
    """The package's, such as ``rlplug-my-reward``."""
    module: str
    """The import's, such as ``rlplug_my_reward``."""
    class_name: str
    """The registered class's, such as ``MyReward``."""
    variable: str
    """Beginning of its environment variables, such as ``MY_REWARD``."""


def names_of(given: str) -> Names:
    """Return all names of a plugin, given its own or its package's.

    Raises:
        ConfigError: It is not made of lower-case words.
    """
    name = given.removeprefix("rlplug-")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z][a-z0-9]*)*", name) or len(name) > LONGEST_NAME:
        raise ConfigError(
            f"new-plugin: the name is {given!r}: give lower-case words with hyphens between them, each beginning with "
            f"a letter, of at most {LONGEST_NAME} characters, such as my-reward."
        )
    words = name.split("-")
    class_name = "".join(word.capitalize() for word in words)
    if keyword.iskeyword(class_name):  # None, True and False
        raise ConfigError(f"new-plugin: the name is {given!r}, and {class_name} cannot be a class: add a word.")
    module = "_".join(words)
    return Names(name, f"rlplug-{name}", f"rlplug_{module}", class_name, module.upper())


def rendered_files(names: Names, kind: str) -> dict[str, str]:
    """Return the text of each file of a new plugin, by its path in the plugin's folder.

    Raises:
        ConfigError: The class would have the name of something that its own file uses.
    """
    values = {**vars(names), **_claimed_versions()}
    about = {part: _rendered(getattr(KINDS[kind], part), values) for part in ("title", "summary", "evidence")}
    files: dict[str, str] = {}
    templates = resources.files("rlplug_devkit.new_plugin").joinpath("templates")
    for folder in ("common", kind):
        for path, text in _files_below(templates.joinpath(folder)).items():
            if path.endswith(SUFFIX):
                text = _rendered(text, values | about)
            files[_target(path, names)] = text
    for path, text in files.items():
        if path.endswith(".py"):
            _check_class_name(names, path, text)
    return dict(sorted(files.items()))


def compatible_range(installed: Version) -> str:
    """Return the versions that a plugin for ``installed`` works with: up to the next that may break it."""
    major, minor = installed.release[:2]
    return f">={major}.{minor},<{major + 1}" if major else f">=0.{minor},<0.{minor + 1}"


def write_files(files: Mapping[str, str], folder: Path) -> None:
    """Write files, of which none replaces another.

    Raises:
        ConfigError: A file is there with another text, or cannot be written. Then nothing was written.
    """
    try:
        for path, text in files.items():
            if (folder / path).exists() and (folder / path).read_text() != text:
                raise ConfigError(
                    f"new-plugin: {folder / path} exists with another text: remove it, or give another --folder."
                )
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"new-plugin: cannot write {folder}: {error}. Give another --folder.") from error


def _claimed_versions() -> dict[str, str]:
    installed = Version(version("rlplug"))
    oldest = ".".join(map(str, installed.release[:2]))
    return {"rlplug_range": compatible_range(installed), "oldest_rlplug": f"=={oldest}.0"}


def _rendered(text: str, values: Mapping[str, Any]) -> str:
    # double angle brackets, since those of Jinja are GitHub Actions' and Python's too
    environment = jinja2.Environment(
        variable_start_string="<<",
        variable_end_string=">>",
        block_start_string="<%",
        block_end_string="%>",
        comment_start_string="<#",
        comment_end_string="#>",
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.from_string(text).render(values)


def _files_below(folder: Any, before: PurePosixPath | None = None) -> dict[str, str]:
    """Return texts of files by their path below ``folder``, which may lie in a zip file."""
    here = before or PurePosixPath()
    found: dict[str, str] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            if entry.name != "__pycache__":
                found |= _files_below(entry, here / entry.name)
        else:
            found[str(here / entry.name)] = entry.read_text(encoding="utf-8")
    return found


def _target(path: str, names: Names) -> str:
    """Return where a template's file goes: packages have no files that begin with a dot, and so templates have none."""
    parts = [part.replace("MODULE", names.module) for part in path.removesuffix(SUFFIX).split("/")]
    return "/".join(f".{part.removeprefix('dot_')}" if part.startswith("dot_") else part for part in parts)


def _check_class_name(names: Names, path: str, text: str) -> None:
    """Raise where a class of the plugin's name would replace what its module imports or defines under that name."""
    bound = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            bound.append(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            bound += [alias.asname or alias.name for alias in node.names]
    if bound.count(names.class_name) > 1:
        raise ConfigError(
            f"new-plugin: the plugin's class would be {names.class_name}, a name that {path} uses for something else: "
            "add a word to the plugin's name."
        )
