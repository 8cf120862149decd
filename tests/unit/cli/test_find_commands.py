"""Commands by entry points: a stranger's command is found as ours are, and what is missing is named."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rlplug.cli.find_commands import find_commands, load_command, summary_of
from rlplug.cli.main import help_text, main
from rlplug.errors import ConfigError, PluginError
from rlplug.plugin_names import missing_distribution

COMMAND = '''
import sys
raise_at_import = {broken}
def tally_command(arguments):
    """Count the runs of a folder: FOLDER.

    More of it.
    """
    print("tally", *arguments)
    return len(arguments)
'''


@pytest.fixture
def install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install a distribution with one command, as pip leaves it."""

    def install(name: str, distribution: str = "acme-tally", broken: str = "0") -> None:
        module = f"{distribution}_command".replace("-", "_")
        info = tmp_path / distribution / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[rlplug.commands]\n{name} = {module}:tally_command\n")
        (info.parent / f"{module}.py").write_text(COMMAND.format(broken=broken))
        monkeypatch.syspath_prepend(info.parent)
        importlib.invalidate_caches()

    return install


def test_a_command_of_another_distribution_is_listed_without_its_import_and_runs(install_command, capsys):
    install_command("tally", broken="1 / 0")
    commands = find_commands()
    assert list(commands)[:2] == ["fit", "validate"]
    assert summary_of(commands["tally"]) == "Count the runs of a folder: FOLDER."
    assert re.search(r"^  tally +Count the runs of a folder: FOLDER\.$", help_text(), re.M)
    install_command("count", distribution="acme-count")
    assert main(["count", "--debug", "a", "b"]) == 2
    assert capsys.readouterr().out == "tally a b\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wach", "there is no command 'wach'. Did you mean 'watch'? There are fit, validate, "),
        ("", "there is no command ''. There are fit, validate, "),
    ],
)
def test_an_unknown_command_lists_those_that_there_are(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_command(name)
    assert message in str(caught.value)


def test_a_command_of_a_wheel_that_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlplug.cli.find_commands.entry_points", lambda **of: ())
    with pytest.raises(ConfigError, match="the command 'watch' comes with rlplug-watch: pip install rlplug-watch"):
        load_command("watch")


def test_two_distributions_with_one_command_are_both_named(install_command) -> None:
    install_command("tally")
    install_command("tally", distribution="acme-other")
    with pytest.raises(PluginError, match="acme-other and acme-tally both bring the command 'tally'"):
        load_command("tally")
    assert "fit" in find_commands()  # the others work


def test_a_command_that_cannot_be_imported_says_whose_it_is(install_command) -> None:
    install_command("broken", distribution="acme-broken", broken="__import__('acme_not_there')")
    with pytest.raises(PluginError, match=r"'broken' of acme-broken cannot be imported: .*acme_not_there"):
        load_command("broken")


def test_only_what_is_not_installed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_distribution("commands", "report") is None
    monkeypatch.setattr("rlplug.plugin_names.distributions", lambda name: iter(()))
    assert missing_distribution("commands", "report") == "rlplug-watch"
    assert missing_distribution("commands", "fit") is None
