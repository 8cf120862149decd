"""Tests of one ``rlplug check``: a class of the right kit for each subject of the job, which a variable names."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlplug_devkit.check.subjects import Subject, class_name
from rlplug_devkit.promises import KITS

JOB = "RLPLUG_CHECK_JOB"
MAKERS = {
    "algorithm": "make_algorithm",
    "reward": "make_reward",
    "environment": "make_environment",
    "data source": "make_source",
    "engine": "make_engine",
    "trainer": "make_trainer",
}
"""Method of each kit that returns the object to check."""


def make_test_class(subject: Subject) -> type:
    """Return a test class of a subject."""
    body: dict[str, Any] = {**subject.settings, "__module__": __name__}
    if subject.kind == "hooks":
        body["make_plugin"] = lambda self: __import__(subject.place, fromlist=["rlplug"])
    elif subject.kind == "optimization":
        body["make_optimizations"] = lambda self: {subject.name: [subject.make()]}
    else:
        body[MAKERS[subject.kind]] = lambda self: subject.make()
    return type(class_name(subject), (KITS[subject.kind],), body)


def _subjects() -> Sequence[Subject]:
    file = os.environ.get(JOB)
    found: Sequence[Subject] = pickle.loads(Path(file).read_bytes()) if file else ()
    return found


for each in _subjects():
    globals()[class_name(each)] = make_test_class(each)
