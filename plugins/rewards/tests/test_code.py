"""Code rewards: what passes, and that nothing passes which does not do the task."""

from __future__ import annotations

import dataclasses

import pytest
from isolated_code import code_reward
from rlplug_rewards.code import CodeReward
from rlplug_rewards.code.reward import code_of
from rlplug_rewards.code.row_tests import read_row

from rlplug.errors import ConfigError
from rlplug.rewards import RewardRunner
from rlplug.types import RewardError

pytestmark = pytest.mark.kit

TESTS = ["assert double(2) == 4", "assert double([1]) == [1, 1]", "assert abs(double(0.1) - 0.2) < 1e-6"]
CASES = [{"input": "1 2\n", "output": "3\n"}, {"input": "10 -4", "output": "6"}]
RIGHT = "def double(x):\n    return 2 * x\n"
SUMS = "print(sum(int(word) for word in input().split()))\n"


@pytest.fixture(scope="module")
def reward():
    # time for a slow machine: what takes the time is hostile code alone, in tests that set their own
    return code_reward(test_s=100.0, timeout_s=200.0, num_processes=2)


def score(reward, make_sample, code, fence="python", **row):
    made = make_sample(f"Here it is:\n```{fence}\n{code.rstrip()}\n```\n", **row)
    made = dataclasses.replace(made, last_turn=made.completion)
    (sample,) = RewardRunner([reward], deadline_s=500).score([made])
    return sample.rewards["codereward"]


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (RIGHT, 1.0),
        ("def double(x):\n    return x * 2 if isinstance(x, int) else x + x\n", 1.0),
        ("def double(x):\n    return x + x if isinstance(x, list) else 4\n", 2 / 3),
        ("def double(x):\n    return 5\n", 0.0),
        ("def double(x): return", 0.0),
        ("def treble(x):\n    return 2 * x\n", 0.0),
        ("def double(x:\n", 0.0),
    ],
)
def test_the_reward_is_the_share_of_tests(reward, make_sample, code, value):
    assert score(reward, make_sample, code, tests=TESTS) == pytest.approx(value)


def test_cases_compare_what_a_program_prints(reward, make_sample):
    assert score(reward, make_sample, SUMS, cases=CASES) == 1.0
    assert score(reward, make_sample, "print(3)", cases=CASES) == 0.5
    assert score(reward, make_sample, "print(3)\nraise SystemExit(1)", cases=CASES[:1]) == 0.0
    assert score(reward, make_sample, RIGHT + SUMS, cases=CASES, tests=["assert True"]) == pytest.approx(2 / 3)


def test_all_or_nothing(make_sample):
    reward = code_reward(all_or_nothing=True, test_s=100.0, timeout_s=200.0)
    assert score(reward, make_sample, "print(3)", cases=CASES) == 0.0
    assert score(reward, make_sample, SUMS, cases=CASES) == 1.0


def test_objects_of_the_code_can_be_used(reward, make_sample):
    code = (
        "class Stack:\n"
        "    def __init__(self, items=()):\n        self.items = list(items)\n"
        "    def push(self, item):\n        self.items.append(item)\n        return self\n"
        "    def __len__(self):\n        return len(self.items)\n"
        "    def __iter__(self):\n        return iter(self.items)\n"
        "def negative(x):\n    raise ValueError(x)\n"
    )
    tests = [
        "stack = Stack([1])\nassert len(stack.push(2)) == 2\nassert list(stack) == [1, 2]\nassert stack.items[1] == 2",
        "try:\n    negative(1)\nexcept ValueError:\n    pass\nelse:\n    assert False",
        "def check(candidate):\n    assert candidate(items=(1, 2)).items == [1, 2]\ncheck(Stack)",
    ]
    assert score(reward, make_sample, code, tests=tests) == 1.0


HOSTILE = {
    "exits with 0": "import os\nos._exit(0)",
    "exits in a call": "import os\ndef double(x):\n    os._exit(0)",
    "raises SystemExit": "def double(x):\n    raise SystemExit(0)",
    "prints the verdict": "print('3')\nprint('{\"text\": \"3\"}')\ndef double(x):\n    print('3')",
    "is equal to all": (
        "class Equal:\n    def __eq__(self, other): return True\n"
        "    __lt__ = __rsub__ = __sub__ = __contains__ = __eq__\n"
        "def double(x): return Equal()"
    ),
    "is equal as a number": "class N(int):\n    def __eq__(self, other): return True\ndef double(x): return N(0)",
    "replaces built-ins": (
        "import builtins\nbuiltins.abs = abs = lambda x: 0\nbuiltins.compile = builtins.exec = lambda *a: None\n"
        "def double(x): return 0 if isinstance(x, float) else None\n"
        "__builtins__ = AssertionError = None"
    ),
    "writes to all files": (
        "import os\nfor number in range(3, 100):\n    for end in (number, f'/proc/{os.getppid()}/fd/{number}'):\n"
        "        try:\n            file = end if isinstance(end, int) else os.open(end, os.O_WRONLY)\n"
        '            os.write(file, b\'{"text": "3"}\\n\')\n'
        "        except OSError:\n            pass\ndef double(x): return 0"
    ),
    "writes the checker's memory": (
        "import os\ntry:\n    open(f'/proc/{os.getppid()}/mem', 'r+b').close()\n    found = True\n"
        "except OSError:\n    found = False\n"
        "def double(x): return (4 if x == 2 else [1, 1] if x == [1] else 0.2) if found else None"
    ),
    "reads what is expected": (
        "import os, sys\ntexts = [repr(frame) for frame in sys._current_frames().values()]\n"
        "for name in ('cmdline', 'environ', 'mem'):\n    for pid in ('self', os.getppid()):\n"
        "        try:\n            data = open(f'/proc/{pid}/{name}', 'rb').read(1 << 20)\n"
        "            texts.append(data.decode(errors='replace'))\n"
        "        except OSError:\n            pass\n"
        "import gc\ntexts += [each for each in gc.get_objects() if isinstance(each, str)]\n"
        "def double(x): return 4 if x == 2 and any('double' + '(2) ==' in text for text in texts) else None"
    ),
    "is equal as an operand": (
        "class Zero:\n    def __sub__(self, other): return Zero()\n    def __abs__(self): return 0.0\n"
        "    __float__ = __neg__ = __abs__\n    __rsub__ = __add__ = __sub__\n"
        "    __lt__ = __le__ = __eq__ = lambda self, other: True\n"
        "def double(x): return Zero()"
    ),
    "is a class": (
        "class Double:\n    def __new__(cls, *args): return super().__new__(cls)\n"
        "    def __eq__(self, other): return True\n    __lt__ = __sub__ = __contains__ = __eq__\n"
        "double = Double"
    ),
    "calls back what nobody gave": (
        "import os\nfor number in range(3, 20):\n    try:\n"
        '        os.write(number, b\'("callback", 0, ("list", []), ("dict", []))\\n\')\n'
        "    except OSError:\n        pass\ndef double(x): return None"
    ),
    "kills the checker": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef double(x): return None",
    "answers with nonsense": (
        "import os\nfor number in range(3, 20):\n    try:\n        os.write(number, b'(\"names\", 3)\\n' * 3)\n"
        "    except OSError:\n        pass\ndef double(x): return 4"
    ),
}


def test_a_function_with_a_capital_letter_does_not_compare(reward, make_sample):
    equal = "class Extract:\n    def __init__(self, *args): pass\n    def __eq__(self, other): return True\n"
    assert score(reward, make_sample, equal, tests=["assert Extract([[1], [2]]) == [1, 2]"]) == 0.0


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_code_gets_nothing(reward, make_sample, what):
    assert score(reward, make_sample, HOSTILE[what] + "\n", tests=TESTS) == 0.0


ENDLESS = {
    "runs for ever": "while True:\n    pass",
    "sleeps in a call": "import time\ndef double(x):\n    time.sleep(1e6)",
    "forks without end": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "forks and hides": (
        "import os, time\nfor _ in range(100):\n    try:\n        if os.fork() == 0:\n            os.setsid()\n"
        "            time.sleep(1e6)\n    except OSError:\n        pass\ndef double(x): return None"
    ),
    "fills the memory": "kept = []\nwhile True:\n    kept.append(bytes(1 << 24))",
    "stops the checker": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nwhile True:\n    pass",
}


@pytest.mark.parametrize("what", ENDLESS)
def test_endless_code_ends(make_sample, what):
    reward = code_reward(test_s=1.0, timeout_s=2.0, memory_mib=256)
    assert score(reward, make_sample, ENDLESS[what] + "\n", tests=TESTS[:2]) == 0.0


@pytest.mark.parametrize(
    "code", ["while True:\n    print('3' * 10_000)\n", "import sys\nsys.stdout.write('3' * (1 << 26))\n"]
)
def test_huge_output_ends(reward, make_sample, code):
    assert score(reward, make_sample, code, cases=CASES) == 0.0


def test_code_leaves_nothing_behind(reward, make_sample, tmp_path):
    names = ["/tmp/of-a-completion", "of-a-completion", str(tmp_path / "file")]
    code = (
        "import os\nfound = os.path.exists('/tmp/of-a-completion') or os.path.exists('of-a-completion')\n"
        f"for name in {names}:\n"
        "    try:\n        open(name, 'w').close()\n    except OSError:\n        pass\n"
        "def is_first(): return not found\n"
    )
    for _ in range(2):
        assert score(reward, make_sample, code, tests=["assert is_first()"]) == 1.0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```\nor\n```py\nb\n```", "b\n"),
        ("```python\na\n```\n```bash\nls\n```", "a\n"),
        ("```python\na\n", None),
        ("a", None),
        ("```python\n" + "a" * (1 << 18) + "\n```", None),
        ("```python\r\na\r\n```\r\n", "a\n"),
        ("``` python\na\n```", "a\n"),
        ("```PYTHON\na\n```", "a\n"),
        ("```Python3\na\n```", "a\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("````python\na\n```\nb\n````", "a\n```\nb\n"),
        ("```{.python .numberLines}\na\n```", "a\n"),
        ('```python title="a.py"\na\n```', "a\n"),
        ("1. First:\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b\n"),
        ("- ```python\n  a\n  ```", "a\n"),
        ("> ```python\n> a\n> ```", "a\n"),
        ("Here: ```python\na\n```", "a\n"),
        ("```bash\nls\n```\n```python\na\n```\n```bash\nls\n```", "a\n"),
        ("```bash\nls\n```\ntext\n```\na\n```\n", "a\n"),
        ("```python\na\n```\nIt prints:\n```text\n3\n```", "a\n"),
        ("<answer>\n```python\na\n```</answer>", "a\n"),
        ("Use `a` and ``b``.\n```python\na\n```", "a\n"),
        ("```js\na\n```", None),
        ("```python\na\n~~~\n```", "a\n~~~\n"),
        ("```python\n\ta\n```", "\ta\n"),
    ],
)
def test_the_code_is_the_last_block(text, code):
    assert code_of(text) == code


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "neither 'tests' nor 'cases'"),
        ({"tests": "assert True"}, "not a list of texts"),
        ({"tests": ["assert ("]}, "SyntaxError"),
        ({"cases": [{"input": "1"}]}, "objects with input and output"),
        ({"tests": ["assert abs(sum(1, 2)) == 3"]}, "its tests call abs, sum"),
        ({"tests": ["def check(candidate):\n    assert candidate(1)"]}, "does not call it"),
    ],
)
def test_rows_without_usable_tests_are_errors(reward, make_sample, row, words):
    error = score(reward, make_sample, RIGHT, **row)
    assert isinstance(error, RewardError)
    assert words in error.message
    with pytest.raises(ConfigError, match=r"cannot run the tests of prompt 'train.jsonl:0'"):
        reward.check_prompts([make_sample(**row).prompt])


def test_names_of_the_code_follow_from_the_tests():
    row = {
        "tests": [
            "import math\nassert math.isclose(copy(1.0), abs(-1))",
            "assert string.digits == name and len(x) == 1",
        ]
    }
    found = read_row(row, "tests", "cases", "entry_point")
    assert (found.names, found.modules) == (["copy", "name", "x"], ["string"])
    assert read_row(
        {"tests": ["v = V(1)\nassert v.x == Extract(2) + abs(W(1) * 2) and K(1) == K(1)"]}, "tests", "", ""
    ).classes == ["K", "V"]
    assert read_row({"tests": ["assert sum(1, 2) == 3"]}, "tests", "cases", "entry_point").names == ["sum"]


def test_code_in_a_thought_is_none(reward, make_sample):
    code = f"```python\n{RIGHT}```"
    texts = [f"<think>{code}", f"<think>{code}</think>No.", f"<think>Hm.</think>{code}"]
    samples = [make_sample(text, tests=["assert double(2) == 4"]) for text in texts]
    assert reward.score(samples) == [0.0, 0.0, 1.0]


def test_code_does_not_run_where_it_is_not_isolated(make_sample, monkeypatch):
    reward = CodeReward()
    monkeypatch.setattr(reward._pool, "check", lambda: None)
    monkeypatch.setattr(reward._pool, "call", lambda *_, **__: pytest.fail("the code ran"))
    with pytest.raises(ConfigError, match="does not isolate it"):
        reward.notes()
    assert "does not isolate it" in score(reward, make_sample, RIGHT, tests=TESTS).message


@pytest.mark.parametrize("options", [{"test_s": 0.0}, {"timeout_s": -1.0}, {"num_processes": 0}, {"memory_mib": 1}])
def test_options_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        CodeReward(**options)
