"""The quickstart's notebook runs from top to bottom, in a kernel whose event loop already runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart" / "notebook.ipynb"


def test_the_notebook_trains(tmp_path: Path) -> None:
    """Alone catches what a kernel does not have: a main module with a file, a terminal, a thread without a loop."""
    folder = shutil.copytree(NOTEBOOK.parent, tmp_path / "quickstart", ignore=shutil.ignore_patterns("runs"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}}).execute()

    trained, rewards, _ = (
        cell.outputs[-1].data["text/plain"] for cell in notebook.cells if cell.get("execution_count", 0) > 2
    )
    assert trained.startswith("RewardChange(")
    assert len(rewards.split(",")) == 10
    assert (folder / "runs" / "notebook" / "001" / "policy" / "model.safetensors").exists()
