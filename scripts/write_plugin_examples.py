"""Writes the plugins that pages of docs/ show: the files of ``rlplug new-plugin``, from its templates.

Where a page has the command ``rlplug new-plugin NAME --kind KIND``, each code block that begins with a comment such as
``# rlplug-NAME/pyproject.toml`` gets the text of that file. ``python scripts/write_plugin_examples.py`` (or
``make docs``) writes them; ``--check`` writes nothing and exits with 1 when a page differs from the templates.
"""

from __future__ import annotations

import re
import sys
from typing import Final

from distributions import ROOT
from rlplug_devkit.new_plugin.rendering import names_of, rendered_files
from written_files import write_or_check

COMMAND: Final = re.compile(r"^rlplug new-plugin (\S+) --kind (\w+)", re.M)
BLOCK: Final = re.compile(r"^(```\w+\n# (\S+)\n)(.*?)^```$", re.M | re.S)


def with_examples(page: str) -> str:
    """Return a page whose blocks have the files of the plugins that the page has its reader make.

    Raises:
        SystemExit: A block names a file of such a plugin that ``rlplug new-plugin`` does not write.
    """
    files: dict[str, str] = {}
    for name, kind in COMMAND.findall(page):
        names = names_of(name)
        files |= {f"{names.distribution}/{path}": text for path, text in rendered_files(names, kind).items()}
    folders = {path.partition("/")[0] for path in files}

    def replaced(block: re.Match[str]) -> str:
        begin, path, _ = block.groups()
        if path.partition("/")[0] not in folders:
            return block[0]
        if path not in files:
            raise SystemExit(f"rlplug new-plugin writes no {path}: its files are {', '.join(files)}")
        return f"{begin}{files[path]}```"

    return BLOCK.sub(replaced, page)


def main() -> int:
    options = [option for option in sys.argv[1:] if option == "--check"]
    pages = [page for page in sorted(ROOT.glob("docs/*.md")) if COMMAND.search(page.read_text())]
    return max(write_or_check(__doc__, page, with_examples, options) for page in pages)


if __name__ == "__main__":
    sys.exit(main())
