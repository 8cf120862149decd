"""Sphinx settings of the documentation's site: ``make site`` builds it, with warnings as errors.

Pages stay Markdown that reads well in the repository. For the site, links out of ``docs/`` become links to the
repository, the sidebar follows the lists of ``index.md``, and each plugin gets a page of its public names.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from docutils.nodes import Element
    from sphinx.application import Sphinx

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from distributions import Distribution, plugin_distributions  # noqa: E402
from repository_links import IMAGES, REPOSITORY, absolute_links  # noqa: E402
from sphinx.util.logging import getLogger  # noqa: E402

from rlplug.plugin_manager import plugins  # noqa: E402

PLUGIN_PAGES: Final = ROOT / "docs" / "api" / "plugins"

logger = getLogger(__name__)

project = "rlplug"
author = "the rlplug authors"
release = Distribution(ROOT).version
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"rlplug {release}"
html_show_sphinx = False
html_copy_source = False
myst_heading_anchors = 4
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_mock_imports = ["tensorrt_llm"]  # not on PyPI for this Python; its workers alone import the extension
autodoc_typehints_format = "short"
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

_attribute_docstrings: dict[str, list[str]] = {}


def link_to_repository(name: str, text: str) -> str:
    """Make links to files outside ``docs/`` absolute; the site has images of its own."""
    docs = ROOT / "docs"
    try:
        return absolute_links(
            text, (docs / name).parent, stays=lambda path: path.is_relative_to(docs) or path.suffix in IMAGES
        )
    except FileNotFoundError as error:
        logger.warning(str(error), location=name)
        return text


def sidebar(index: str) -> str:
    """Return a hidden table of contents for each heading of ``index.md``, with the pages that its list links to."""
    parts = []
    for section in re.split(r"^## ", index, flags=re.M)[1:]:
        pages = re.findall(r"^- \[[^]]+\]\((\S+)\.md\)", section, re.M)
        if section.startswith("Reference"):
            pages += ["api/index", f"Repository <{REPOSITORY}>"]
        parts.append(
            "\n".join(["```{toctree}", ":hidden:", f":caption: {section.partition(chr(10))[0]}", "", *pages, "```"])
        )
    return "\n\n".join(parts)


def public_names(distribution: Distribution) -> list[str]:
    """Return directives for what a distribution exports.

    That is what its package has in ``__all__``; else, of one with commands, the classes that it registers, and of all
    others each module, and each package inside it that has an ``__all__``.
    """
    directives = []
    for package in distribution.packages:
        module, source = importlib.import_module(package), distribution.folder / "src" / package
        if hasattr(module, "__all__"):
            directives += [directive(f"{package}.{name}", getattr(module, name)) for name in module.__all__]
        elif distribution.commands:
            registered = plugins().registry.by_distribution().get(distribution.name, [])
            directives += [directive(each.name, each.factory) for each in registered]
        else:
            names = [file.stem for file in source.glob("[a-z]*.py") if file.stem != "plugin"]
            names += [file.parent.name for file in source.glob("*/__init__.py") if "__all__" in file.read_text()]
            directives += [f"{name}\n{'-' * len(name)}\n\n.. automodule:: {package}.{name}" for name in sorted(names)]
    return directives


def directive(name: str, exported: Any) -> str:
    """Return the directive that documents a class or function where it is defined, or names a constant."""
    if not hasattr(exported, "__qualname__"):
        return f".. py:data:: {name}"
    kind = "autoclass" if inspect.isclass(exported) else "autofunction"
    return f".. {kind}:: {exported.__module__}.{exported.__qualname__}"


def write_plugin_pages(app: Sphinx) -> None:
    """Write the reference of each plugin, which autodoc fills in."""
    PLUGIN_PAGES.mkdir(exist_ok=True)
    pages = {f"{d.folder.name}.rst": d for d in plugin_distributions()}
    for stale in {file.name for file in PLUGIN_PAGES.glob("*.rst")} - pages.keys():
        (PLUGIN_PAGES / stale).unlink()
    for name, distribution in pages.items():
        title = [distribution.name, "=" * len(distribution.name), f"{distribution.project['description']}."]
        commands = ", ".join(f"``rlplug {command}``" for command in distribution.commands)
        about = [title[2], f"Commands: {commands}."] if commands else [title[2]]
        text = "\n\n".join(["\n".join(title[:2]), *about, *public_names(distribution)]) + "\n"
        page = PLUGIN_PAGES / name
        if not page.exists() or page.read_text() != text:  # an unchanged page is not read again
            page.write_text(text)


def adapt_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Adapt one page of Markdown to the site."""
    if app.env.doc2path(name).suffix == ".md":
        source[0] = link_to_repository(name, source[0])
    if name == "index":
        source[0] += f"\n{sidebar(source[0])}\n"


def keep_attribute_docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Keep an attribute's docstring from napoleon, which takes the words before a colon for a type."""
    if what in ("attribute", "data", "property"):
        _attribute_docstrings[name] = list(lines)


def restore_attribute_docstring(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Put back what :func:`keep_attribute_docstring` kept."""
    if name in _attribute_docstrings:
        lines[:] = _attribute_docstrings.pop(name)


def drop_plain_bases(app: Sphinx, domain: str, objtype: str, content: Element) -> None:
    """Remove the line "Bases: object"."""
    if content.children and content.children[0].astext() == "Bases: object":
        del content.children[0]


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", write_plugin_pages)
    app.connect("source-read", adapt_page)
    app.connect("autodoc-process-docstring", keep_attribute_docstring, priority=100)
    app.connect("autodoc-process-docstring", restore_attribute_docstring, priority=900)  # napoleon's is 500
    app.connect("object-description-transform", drop_plain_bases)
