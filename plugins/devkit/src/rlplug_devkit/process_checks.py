"""Check of every kind: what all calls until now changed of the process, and of the machine's files."""

from __future__ import annotations

from typing import ClassVar

from rlplug_devkit.tasks.calls import TaskChecks


class ProcessChecks(TaskChecks):
    """The last check of a kit: what it reports, any earlier one may have caused.

    Attributes:
        changes_of_process: Settings of the process that the plugin has to change, by the names that the check uses.
    """

    changes_of_process: ClassVar[frozenset[str]] = frozenset()

    def test_the_process_is_left_as_it_was(self) -> None:
        """By no call of any check: a change that is made once is there in all later ones."""
        changes = [text for name, text in self.guard.changes.items() if name not in self.changes_of_process]
        changes += [f"a call moves the global generator {name}" for name in sorted(self.guard.generators)]
        assert not changes, (
            f"{'; '.join(changes)}. The trainer and all other plugins share them: pass options to the calls that need "
            "them, restore what is set before a call returns, and write into a temporary folder."
        )
