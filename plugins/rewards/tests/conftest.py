"""Fixtures of the tests of judges."""

import pytest
from judge_server import by_length, judge_server


@pytest.fixture
def server():
    with judge_server(by_length) as made:
        yield made


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "judge.jinja"
    path.write_text("Task: {{ prompt }}\nAnswer: {{ completion }}\nReference: {{ answer }}")
    return path
