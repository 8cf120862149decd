"""``rlplug new-plugin``: a folder with a plugin that builds, is tested and trains, to be edited."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlplug_devkit.new_plugin.kinds import KINDS


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "rlplug new-plugin",
        description="Write the folder of a new plugin: a package with a small working part of its kind, its tests, "
        "a run's configuration and a workflow for GitHub Actions.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="the plugin's name, such as my-reward; a package is rlplug-NAME")
    parser.add_argument("--kind", required=True, choices=KINDS, help="what the plugin brings")
    parser.add_argument("--folder", type=Path, help="where to write it; rlplug-NAME in this folder by default")
    return parser


def new_plugin_command(arguments: list[str]) -> None:
    """Write a package with a plugin of your own, to be edited: NAME --kind reward.

    Raises:
        ConfigError: The name does not fit, or the folder has files of its own.
    """
    options = make_parser().parse_args(arguments)
    from rlplug_devkit.new_plugin.rendering import names_of, rendered_files, write_files

    names = names_of(options.name)
    folder = options.folder or Path(names.distribution)
    files = rendered_files(names, options.kind)
    write_files(files, folder)
    print(f"wrote {KINDS[options.kind].title} into {folder}, {len(files)} files. Next:\n")
    print(f"  pip install --editable '{folder}[test]'\n  rlplug plugins --check\n  python -m pytest {folder}")
