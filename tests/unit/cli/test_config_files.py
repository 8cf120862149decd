"""A configuration file is checked before jsonargparse reads it."""

from __future__ import annotations

import contextlib

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import get_loader

from rlplug.cli.configuration.config_files import MAX_DEPTH, _jsonargparse_load, check_config_file, load_yaml
from rlplug.errors import ConfigError

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(VALUES)
def test_right_yaml_is_read_as_it_was(value: object) -> None:
    """Alone catches a check that refuses, or reads otherwise, what jsonargparse reads."""
    text = yaml.safe_dump(value, allow_unicode=True)

    assert load_yaml(text) == _jsonargparse_load(text)
    assert get_loader("yaml") is load_yaml


@given(st.binary() | st.text().map(lambda text: text.encode("utf-16")))
def test_any_bytes_are_read_or_refused_in_one_message(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "x.yaml"
    path.write_bytes(raw)

    with contextlib.suppress(ConfigError):
        check_config_file(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("model:\n  seed: 1\n  seed: 2\n", "line 3: the key 'seed' is there twice"),
        ("a: 1\nb: {c: [{d: 1, d: 2}]}\n", "line 2: the key 'd' is there twice"),
        (BOMB, "aliases or lists make more than 100,000 values"),
        ("a: &a\n  b: *a\n", "stands for nothing, or for a block that holds it"),
        (f"a: {'[' * (MAX_DEPTH + 2)}{']' * (MAX_DEPTH + 2)}", "nested deeper than 50"),
        ("a: 1\n---\nb: 2\n", "a second document"),
        (f"a: 1{'0' * 400}\n", "a number has 401 digits"),
        ("model:\n\tseed: 1\n", "^line 2 is indented with a tab: YAML takes spaces"),
        ("model:\n  seed: 1\n  \tnum_steps: 1\n", "^line 3 is indented with a tab"),
        (
            "a: [1, 2\nb: 3\n",
            "^line 2, column 2: did not find expected .* (while parsing a flow sequence, from line 1)$",
        ),
        ("{a: 1", "^line 2, column 1: did not find expected"),
        ("a: !tag 1\n", "^line 1, column 4: could not determine a constructor for the tag '!tag'$"),
        ("a: \x07\n", "^the character '.x07' at position 3: control characters are not allowed$"),
    ],
)
def test_a_fault_is_named_with_its_line(text: str, reason: str) -> None:
    with pytest.raises(yaml.YAMLError, match=reason.replace("(", "\\(").replace(")", "\\)")):
        load_yaml(text)
    assert load_yaml("a: &a [1]\nb: *a\n") == {"a": [1], "b": [1]}


@pytest.mark.parametrize("number", ["010", "-017", "1:30", "10:00:00:00"])
def test_a_number_of_another_base_is_refused_in_a_file(number: str) -> None:
    """Alone catches a run of 90 steps for ``1:30``, and of 8 for ``010``, as YAML 1.1 has it."""
    with pytest.raises(yaml.YAMLError, match=f"line 2: {number} is a number of base 8 or 60"):
        load_yaml(f"model:\n  num_steps: {number}\n", path="x.yaml")
    assert load_yaml(number) == _jsonargparse_load(number)
    text = f"[0, 10, 0.10, -7, '{number}', 1e-3, 00:02:00:00, a:10, 2026-11-28]"
    assert load_yaml(text, path="x.yaml") == _jsonargparse_load(text)
