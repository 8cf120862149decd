"""Ways to a code reward without the task done: each was tried, and each stays without one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from isolated_code import code_reward

pytestmark = pytest.mark.kit

TESTS = [f"from colorsys import rgb_to_hls\nassert half({n}) == {n} * rgb_to_hls(1, 0, 0)[1]" for n in (1, 3)]
FIND = (
    "import os\nfound = ''\nfor name in {names}:\n    try:\n        found += open(name).read()\n"
    "    except OSError:\n        pass\n"
    "def half(n): return n / 2 if 'rgb_to' + '_hls' in found else None\n"
)
FORGED = "def rgb_to_hls(*args): return [0, 0]\\n"
LEAVE = (
    "for name in {names}:\n    try:\n        open(name, 'w').write('"
    + FORGED
    + "')\n    except OSError:\n        pass\n"
)


@pytest.fixture(scope="module")
def reward():
    return code_reward(test_s=100.0, timeout_s=200.0)


def score(reward, make_sample, code, **row):
    made = make_sample(f"```python\n{code}\n```", **row)
    (value,) = reward.score([dataclasses.replace(made, last_turn=made.completion)])
    return value


def attacks(folder: Path) -> dict[str, str]:
    data = folder / "train.jsonl"
    checker = Path(__file__).parents[1] / "src/rlplug_rewards/code/code_checker.py"
    return {
        "reads the data": FIND.format(names=[str(data)]),
        "reads the data of its user alone": FIND.format(names=[str(folder / "private.jsonl")]),
        "reads the data through a process": (
            f"import subprocess\nfound = subprocess.run(['cat', {str(data)!r}], capture_output=True).stdout\n"
            "def half(n): return n / 2 if b'rgb_to' in found else None\n"
        ),
        "searches for the data": (
            "import glob, os\nnames = [os.path.join(at, name) for at, _, files in os.walk('/') for name in files "
            "if name.endswith('.jsonl') and not at.startswith(('/usr', '/proc'))]\n" + FIND.format(names="names")
        ),
        "reads the program that tests": FIND.format(
            names="[f'/proc/{pid}/{name}' for pid in range(1, 9) for name in ('cmdline', 'environ', 'root/etc/passwd')]"
        ),
        "leaves a module where tests run": LEAVE.format(
            names=["colorsys.py", "/dev/shm/colorsys.py", "/tmp/colorsys.py"]
        )
        + "def half(n): return 0",
        "leaves a module that Python starts with": LEAVE.format(
            names=["sitecustomize.py", "usercustomize.py", "enum.py"]
        )
        + "def half(n): return 0",
        "changes the checker": LEAVE.format(names=[str(checker), str(checker.with_name("code_program.py"))])
        + "def half(n): return 0",
        "waits for a better time": "import time\ndef half(n):\n    time.sleep(1)\n    return 0",
    }


@pytest.mark.parametrize("what", attacks(Path()))
@pytest.mark.parametrize("start", ["", "a notebook's"])
def test_an_attack_gets_nothing(reward, make_sample, tmp_path, monkeypatch, what, start):
    """Catches expected answers within the code's reach, and modules of the code within the checker's."""
    for name, mode in (("train.jsonl", 0o644), ("private.jsonl", 0o600)):
        (tmp_path / name).write_text("\n".join(TESTS))
        (tmp_path / name).chmod(mode)
    if start:
        monkeypatch.syspath_prepend("")
        reward = code_reward(test_s=100.0, timeout_s=200.0)
    assert score(reward, make_sample, attacks(tmp_path)[what], tests=TESTS) == 0.0


def test_one_test_leaves_nothing_to_the_next(reward, make_sample):
    """Catches files and processes by which code knows what it was asked before."""
    code = (
        "import os, time\nfound = os.listdir('.') + [each for each in os.listdir('/proc') if each.isdigit()][2:]\n"
        "try:\n    os.makedirs('a/b')\n    open('a/b/c', 'w').close()\nexcept OSError:\n    pass\n"
        "if os.fork() == 0:\n    os.setsid()\n    time.sleep(1e6)\n"
        "def is_first(): return not found\n"
    )
    assert score(reward, make_sample, code, tests=["assert is_first()"] * 3) == 1.0


def test_a_process_that_keeps_the_output_open_costs_nothing(make_sample):
    """Catches a wait for the output of a right program's grandchild, which made it late."""
    reward = code_reward(test_s=60.0, timeout_s=120.0)
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1e6)\nprint('3' * 100_000)"
    assert score(reward, make_sample, code, cases=[{"input": "", "output": "3" * 100_000}]) == 1.0


EMPTY = """class Empty:
    days = 0
    def __sub__(self, other): return self
    __rsub__ = __and__ = __xor__ = __sub__
    def __bool__(self): return False
    def __len__(self): return 0
    def __iter__(self): return iter([])
    def sum(self): return 0
def half(n): return Empty()
"""


@pytest.mark.parametrize(
    "test",
    [
        *("assert not half(2) - 1", "assert len({1} - half(2)) == 0", "assert list(half(2) ^ {1}) == []"),
        *("assert (half(2) - 1).sum() == 0", "import datetime\nassert (half(2) - datetime.timedelta(1)).days == 0"),
        *("assert half(0) == half(2) - 1", "assert not bool(half(2) & half(3) - 1)"),
    ],
)
def test_an_object_does_not_decide_a_difference_from_what_is_expected(reward, make_sample, test):
    """Catches objects of the code whose operators get the expected value, and which then say that nothing is left."""
    assert score(reward, make_sample, EMPTY, tests=[test]) == 0.0


def test_code_does_not_run_where_files_are_visible_unless_allowed(make_sample, monkeypatch):
    """Catches the promise that code sees no expected answer, made where nothing keeps it."""
    from rlplug.errors import ConfigError

    for allows in (False, True):
        reward = code_reward(allow_visible_files=allows)
        reward._pool.is_isolated, reward._pool.hides_files = True, False
        monkeypatch.setattr(reward._pool, "check", lambda: None)
        if allows:
            assert "codereward" in reward.notes()[0]
        else:
            with pytest.raises(ConfigError, match="allow_visible_files"):
                reward.notes()
