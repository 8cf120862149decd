"""Builds an sdist of each distribution, and from it alone its wheel: ``python scripts/build_distributions.py dist``.

It builds from copies, so that no build folder lands in the repository, and with the setuptools of this environment.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from distributions import ROOT, Distribution, all_distributions
from repository_links import absolute_links

FILES: Final = ("pyproject.toml", "README.md")
IGNORED: Final = shutil.ignore_patterns("__pycache__", "*.egg-info")
BUILD: Final = """
import os, sys, tarfile, tempfile
from setuptools import build_meta
folder = sys.argv[1]
sdist = build_meta.build_sdist(folder)
with tempfile.TemporaryDirectory() as unpacked:
    with tarfile.open(os.path.join(folder, sdist)) as archive:
        archive.extractall(unpacked, filter="data")
    os.chdir(os.path.join(unpacked, sdist.removesuffix(".tar.gz")))
    build_meta.build_wheel(folder)
    os.chdir(folder)
"""


def build(distributions: Iterable[Distribution], folder: Path) -> list[Path]:
    """Write sdists and wheels into ``folder``, which holds nothing else, and return the wheels.

    Raises:
        SystemExit: There is something in the folder.
        CalledProcessError: A distribution does not build.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty: remove it, so that what is published is what was built now.")
    distributions = list(distributions)
    with tempfile.TemporaryDirectory() as temporary:
        for distribution in distributions:
            copy = _copy_sources(distribution, Path(temporary))
            command = [sys.executable, "-c", BUILD, folder.resolve()]
            subprocess.run(command, cwd=copy, check=True, stdout=subprocess.DEVNULL)
    sdists = sorted(folder.glob("*.tar.gz"))
    wheels = sorted(folder.glob("*.whl"))
    assert len(wheels) == len(sdists) == len(distributions), (wheels, sdists)
    return wheels


def _copy_sources(distribution: Distribution, folder: Path) -> Path:
    """Copy what a distribution is built from: its README with links to the repository, and the root's licence."""
    copy = folder / distribution.name
    copy.mkdir()
    for name in FILES:
        if (distribution.folder / name).is_file():
            shutil.copy(distribution.folder / name, copy)
    shutil.copy(ROOT / "LICENSE", copy)
    if (readme := copy / "README.md").is_file():
        readme.write_text(absolute_links(readme.read_text(), distribution.folder, f"v{distribution.version}"))
    source = distribution.folder / "src"
    if source.is_dir():
        shutil.copytree(source, copy / "src", ignore=IGNORED)
    else:
        for package in distribution.packages:
            shutil.copytree(distribution.folder / package, copy / package, ignore=IGNORED)
    return copy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "dist", help="where they go; dist")
    for wheel in build(all_distributions(), parser.parse_args().folder):
        print(f"built {wheel.name} and its sdist")
