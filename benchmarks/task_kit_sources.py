"""Sources of prompts whose mutants ``task_kit_mutants`` makes, with what their authors know of them."""

from __future__ import annotations

import json
import string
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rlplug_data.streaming import RowStream, StreamedRows
from rlplug_devkit import DataSourceConformance

from benchmarks.task_kit_checks import Subject, kit
from rlplug.data.sources import PromptRow, PromptSource, TrainingRows

FOLDER: Final = tempfile.TemporaryDirectory(prefix="mutants-")
RECORDS: Final = [{"prompt": f"{index} + 1 =", "answer": str(index + 1), "level": index % 3} for index in range(12)]


def _path(name: str, text: str) -> str:
    path = Path(FOLDER.name) / name
    if not path.exists():
        path.write_text(text)
    return str(path)


def _jsonl() -> str:
    return _path("train.jsonl", "".join(json.dumps(record) + "\n" for record in RECORDS))


def file_source(made: Mapping[str, Any]) -> type:
    return kit(
        DataSourceConformance,
        make_source=lambda: made["FileSource"](_jsonl(), limit=10),
        make_broken_source=lambda: made["FileSource"]("gone.jsonl"),
        expected=_rows_of_file()[:10],
        defaults={
            "prompt_key": "prompt",
            "answer_key": "answer",
            "limit": None,
            "columns": None,
            "template": None,
            "system_prompt": None,
        },
        broken_options=_wrong_files(made["FileSource"]),
    )


def _wrong_files(source: Any) -> list[tuple[str, Callable[[], Any]]]:
    """Return sources of damaged files, and with options that fit no file."""
    row = json.dumps(RECORDS[0]) + "\n"
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    damaged = {
        "line.jsonl": (row + "\n" + '{"prompt": \n', ":3"),
        "bytes.jsonl": (row + '"\x00"\n', ":2"),
        "list.jsonl": (row + "[1]\n", ":2"),
        "deep.jsonl": (row + "[" * 100_000 + "\n", ":2"),
        "digits.jsonl": (row + '{"prompt": ' + "1" * 5000 + "}\n", ":2"),
        "later.jsonl": (row + '{"question": "a"}\n', ":2"),
        "half.json": ('[\n{"prompt": "a"},\n{"prompt"', ":3"),
        "lines.json": ('{\n"prompt": "a"}', "lines.json"),
        "number.json": ("3", "number.json"),
        "row.json": ('{"prompt": 3}', ":1"),
        "numbers.json": ('[{"prompt": "a"}, 3]', ":2"),
        "none.json": (" ", "none.json"),
        "none.jsonl": ("\n", "none.jsonl"),
        "text.txt": (row, "text.txt"),
        "number.jsonl": (row + '{"prompt": 3}\n', ":2"),
    }
    jsonl = _jsonl()
    options: list[tuple[str, dict[str, Any]]] = [
        ("prompt_key", {"template": "{level}", "prompt_key": "level"}),
        ("template", {"template": "no column"}),
        ("template", {"template": "{level"}),
        ("template", {"template": "{level!r}"}),
        ("template", {"template": "{level:>3}"}),
        ("template", {"template": "{} {level}"}),
        ("columns", {"columns": {"prompt": "a", "answer": "a"}}),
        ("'level'", {"columns": {"prompt": "level"}}),
        ("'question'", {"prompt_key": "question"}),
        ("'solution'", {"answer_key": "solution"}),
        ("'prompt.text'", {"prompt_key": "prompt.text"}),
        ("'level.x'", {"answer_key": "level.x"}),
        ("'gone'", {"template": "{gone}"}),
        ("'gone'", {"columns": {"gone": "prompt"}}),
        ("'level'", {"template": "{level:letters}"}),
        ("limit", {"limit": 0}),
    ]
    systems = _path("system.jsonl", json.dumps({"prompt": chat, "empty": [], "many": ["a"] * 27, "gap": None}) + "\n")
    return [
        *((name, lambda file=file, text=text: source(_path(file, text))) for file, (text, name) in damaged.items()),
        *((name, lambda given=given: source(jsonl, **given)) for name, given in options),
        ("system_prompt", lambda: source(systems, system_prompt="c")),
        *(
            ("'empty'" if key == "empty" else f"'{key}'", lambda k=key: source(systems, template=f"{{{k}}}"))
            for key in ("empty", "gap")
        ),
        ("'many'", lambda: source(systems, template="{many:letters}")),
    ]


def _rows_of_file() -> list[PromptRow]:
    return [
        PromptRow(f"train.jsonl:{number}", record["prompt"], record["answer"], {"level": record["level"]})
        for number, record in enumerate(RECORDS, start=1)
    ]


def templates(made: Mapping[str, Any]) -> type:
    records = [{"q": f"{n}?", "choices": ["sky", "sea"], "reward": {"truth": n}, "kept": n} for n in range(9)]
    path = _path("choices.json", json.dumps(records))
    return kit(
        DataSourceConformance,
        make_source=lambda: made["FileSource"](
            path,
            answer_key="reward.truth",
            columns={"q": "question"},
            template="{question} {{}}\n{choices:letters}",
            system_prompt="Be brief.",
        ),
        make_broken_source=lambda: made["FileSource"](path, answer_key="reward.gone"),
        expected=[
            PromptRow(
                f"choices.json:{n + 1}",
                [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": f"{n}? {{}}\nA. sky\nB. sea"},
                ],
                n,
                {"choices": ["sky", "sea"], "reward": {"truth": n}, "kept": n, "question": f"{n}?"},
            )
            for n in range(9)
        ],
    )


def lists(made: Mapping[str, Any]) -> type:
    """Return the kit of a file with an object a line, whose values are lists."""
    letters = string.ascii_uppercase
    records = [{"q": [f"{n}?", f"{n}!"], "options": [f"{n}{letter}" for letter in letters]} for n in range(9)]
    path = _path("objects.json", "".join(json.dumps(record) + "\n" for record in records))

    def of(**options: Any) -> Any:
        return made["FileSource"](path, **{"answer_key": "options.0", "template": "{q.1}\n{options:letters}"} | options)

    return kit(
        DataSourceConformance,
        make_source=of,
        make_broken_source=lambda: of(answer_key="options.26"),
        expected=[
            PromptRow(
                f"objects.json:{n + 1}",
                "\n".join([f"{n}!", *(f"{letter}. {n}{letter}" for letter in letters)]),
                f"{n}A",
                record,
            )
            for n, record in enumerate(records)
        ],
        broken_options=[
            ("'options.26'", lambda: of(answer_key="options.26")),
            ("'options.0.0'", lambda: of(answer_key="options.0.0")),
            ("'q.2'", lambda: of(template="{q.2}")),
        ],
    )


def mixture(made: Mapping[str, Any]) -> type:
    from rlplug_data.curriculum import PassRateCurriculum
    from rlplug_data.mixture import WeightedSource

    from rlplug.data.sources import FileSource

    def of(path: str) -> Any:
        few = PassRateCurriculum(FileSource(path, limit=3), outside=1.0)
        parts = {"few": (few, 2.0), "many": (FileSource(path, limit=9), 1.0)}
        return made["MixtureSource"]({name: WeightedSource(*part) for name, part in parts.items()})

    rows = _rows_of_file()
    expected = [replace(row, uid=f"few/{row.uid}", source="few") for row in rows[:3]]
    expected += [replace(row, uid=f"many/{row.uid}", source="many") for row in rows[:9]]
    made_of = {"make_source": lambda: of(_jsonl()), "make_broken_source": lambda: of("gone.jsonl")}
    file = FileSource(_jsonl())

    def wrong(**parts: Any) -> Callable[[], Any]:
        return lambda: made["MixtureSource"](parts)

    def nested() -> Any:
        inner = made["MixtureSource"]({"a": WeightedSource(file)})
        return made["MixtureSource"]({"outer": WeightedSource(inner)})

    broken = [
        ("'a b'", wrong(**{"a b": WeightedSource(file)})),
        ("'-a'", wrong(**{"-a": WeightedSource(file)})),
        ("sources.outer", nested),
        ("weight", wrong(a=WeightedSource(file, 0.0))),
        ("sources", wrong()),
        ("sources.a", wrong(a=WeightedSource(FileSource(_path("none.jsonl", "\n"))))),
        ("sources.a", wrong(a=WeightedSource(NoRows()))),
    ]
    made_of |= {"expected": lambda: expected, "broken_options": lambda: broken}
    # after each prompt, few is 2/3 of them and many 1/3, to within a prompt
    order = iter([1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2]), iter([1, 2, 3, 4, 5])
    draws = [f"{name}/train.jsonl:{next(order[name == 'many'])}" for name in ("few many few " * 5 + "few").split()]
    rates = {"below": 1 / 3, "within": 1 / 3, "above": 1 / 3, "unknown": 0, "skipped_share": 0, "effective_share": 0}
    metrics = {f"source/few/curriculum_{name}": share for name, share in rates.items()}
    made_of |= {"expected_draws": lambda: draws, "expected_metrics": lambda: metrics}
    return type("Checks", (kit(DataSourceConformance, **made_of),), {"is_part": False})


class NoRows(PromptSource):
    """A source without a row, which says nothing of it."""

    def rows(self) -> Iterator[PromptRow]:
        return iter(())


class Streamed(PromptSource):
    """A source that keeps no prompts."""

    def rows(self) -> Iterator[PromptRow]:
        yield from _rows_of_file()

    def for_training(self, key: str, name: str = "") -> TrainingRows:
        return StreamedRows(Stream(), key, name)


class Stream(RowStream):
    """Rows of ``Streamed``."""

    def __init__(self) -> None:
        self._place = 0

    def begin(self, order: Any) -> None:
        self._place = 0

    def read(self) -> PromptRow | None:
        self._place += 1
        return next(iter(_rows_of_file()[self._place - 1 :]), None)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self._place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._place = state["place"]


def curriculum(made: Mapping[str, Any]) -> type:
    from rlplug_data.mixture import MixtureSource, WeightedSource

    from rlplug.data.sources import FileSource

    mixed = MixtureSource({"a": WeightedSource(FileSource(_jsonl()))})

    def of(path: str) -> Any:
        return made["PassRateCurriculum"](FileSource(path), low=0.0, outside=1e-9)

    # solved in the first step, the rows 2, 6 and 8 are passed over
    rates = {"below": 0, "within": 1 / 3, "above": 1 / 3, "unknown": 1 / 3, "skipped_share": 1 / 9}
    return kit(
        DataSourceConformance,
        make_source=lambda: of(_jsonl()),
        make_broken_source=lambda: of("gone.jsonl"),
        expected=_rows_of_file(),
        expected_draws=[f"train.jsonl:{number}" for number in (*range(1, 13), 1, 3, 4, 5)],
        expected_metrics={f"curriculum/{name}": share for name, share in rates.items()},
        defaults={"low": 0.1, "high": 0.9, "outside": 0.2, "smoothing": 0.5, "pass_threshold": 1.0},
        broken_options=[
            ("PassRateCurriculum.low", lambda: made["PassRateCurriculum"](FileSource(_jsonl()), low=0.8, high=0.2)),
            ("low", lambda: made["PassRateCurriculum"](FileSource(_jsonl()), low=-0.1)),
            ("outside", lambda: made["PassRateCurriculum"](FileSource(_jsonl()), outside=0.0)),
            ("PassRateCurriculum.source", lambda: made["PassRateCurriculum"](mixed)),
        ],
        untrainable=[("data.train", lambda: made["PassRateCurriculum"](Streamed()))],
    )


FILES: Final = {
    "rlplug.data.record_files": ("_read_jsonl", "_read_json", "_parsed", "_as_object", "READERS", "read_records"),
    "rlplug.data.columns": ("_value_of", "Columns"),
    "rlplug.data.sources": ("FileSource",),
}
SOURCES: Final = [
    Subject("FileSource", FILES, file_source),
    Subject("FileSource with a template", FILES, templates),
    Subject("FileSource with lists", FILES, lists),
    Subject("MixtureSource", {"rlplug_data.mixture": ("MixedPrompts", "MixedRows", "MixtureSource")}, mixture),
    Subject(
        "PassRateCurriculum",
        {"rlplug_data.curriculum": ("CurriculumPrompts", "CurriculumRows", "PassRateCurriculum")},
        curriculum,
    ),
]
