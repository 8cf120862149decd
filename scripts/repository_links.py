"""Links of Markdown pages: relative in the repository, absolute where a page is shown elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from distributions import ROOT

REPOSITORY: Final = "https://github.com/rlplug/rlplug"
IMAGES: Final = (".png", ".svg")

_FENCE: Final = re.compile(r"(^```.*?^```$)", re.M | re.S)
_LINK: Final = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def absolute_links(text: str, folder: Path, ref: str = "main", stays: Callable[[Path], bool] | None = None) -> str:
    """Return a page with links to the repository in place of relative ones; code blocks stay as they are.

    Args:
        text: The page.
        folder: Where the page lies.
        ref: Branch or tag to link to.
        stays: Says of a file that a link to it stays relative.

    Raises:
        FileNotFoundError: A link leads nowhere.
    """

    def absolute(found: re.Match[str]) -> str:
        path = (folder / found[1]).resolve()
        if not path.exists():
            raise FileNotFoundError(f"a page in {folder} links to {found[1]}, which does not exist")
        if stays is not None and stays(path):
            return found[0]
        kind = "tree" if path.is_dir() else "raw" if path.suffix in IMAGES else "blob"
        return f"]({REPOSITORY}/{kind}/{ref}/{path.relative_to(ROOT)}{found[2] or ''})"

    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(absolute, part) for part in parts)
