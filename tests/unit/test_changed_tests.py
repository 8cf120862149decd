"""Which tests a push leaves out: it must run those of all that a change can break."""

from __future__ import annotations

import pytest
from changed_tests import is_left_out, is_of_a_change, parts_left_out

OF = "tests/integration/test_docs.py::test_block"


@pytest.mark.parametrize(
    ("changed", "run", "left_out"),
    [
        (["plugins/algos/src/rlplug_algos/grpo.py"], ["algos"], ["engines", "watch", "optims"]),
        (
            ["plugins/engines/src/rlplug_engines/__init__.py"],
            ["engines", "rollout_vllm", "launch"],
            ["algos", "rewards"],
        ),
        (["plugins/sandbox/README.md"], ["sandbox", "rewards"], ["algos", "watch"]),
        (["rlplug/ops.py"], ["algos", "watch", "rollout_vllm"], []),
        (["pyproject.toml", "plugins/algos/tests/test_grpo.py"], ["watch"], []),
        (["docs/lora.md", "README.md"], [], ["algos", "watch"]),
        (["tests/ranks.py"], ["algos", "watch"], []),
    ],
)
def test_what_depends_on_a_change_runs(changed: list[str], run: list[str], left_out: list[str]) -> None:
    files = frozenset(changed)
    out = parts_left_out(files)
    for name in run:
        assert not is_left_out(f"plugins/{name}/tests/test_a.py::test_b", files, out)
    for name in left_out:
        assert is_left_out(f"plugins/{name}/tests/test_a.py::test_b", files, out)
    assert is_left_out("tests/unit/test_ops_logprobs.py::test_a", files, out) == bool(left_out)
    assert not is_left_out("tests/integration/test_quickstart.py::test_a[docs/lora.md]", files, out)


def test_unit_tests_of_the_core_run_where_what_they_import_has_changed() -> None:
    """A helper beside them, update_worker.py, imports the algorithms; test_layout.py reads the sources of all."""
    files = frozenset(["plugins/algos/src/rlplug_algos/grpo.py"])
    out = parts_left_out(files)
    assert not is_left_out("tests/unit/training/test_update.py::test_a", files, out)
    assert is_left_out("tests/unit/rewards/test_runner.py::test_a", files, out)
    assert not is_left_out("tests/unit/test_layout.py::test_a", files, out)


def test_blocks_of_changed_pages_and_of_the_first_pages_run() -> None:
    files = frozenset(["docs/lora.md"])
    out = parts_left_out(files)
    for page in ("README.md", "docs/first-run.md", "docs/lora.md"):
        assert not is_left_out(f"{OF}[{page}:12 bash]", files, out)
    assert is_left_out(f"{OF}[docs/memory.md:12 bash]", files, out)
    assert not is_left_out("tests/integration/test_docs.py::test_links_lead_somewhere[docs/memory.md]", files, out)


def test_a_kit_runs_where_its_plugin_has_changed() -> None:
    test = "plugins/rollout_trtllm/tests/test_conformance.py::TestTRTLLMRollout::test_no_requests"
    assert is_of_a_change(test, frozenset(["plugins/rollout_trtllm/src/rlplug_rollout_trtllm/sampling.py"]))
    assert not is_of_a_change(test, frozenset(["plugins/rollout_vllm/pyproject.toml", "rlplug/ops.py"]))
