"""Sources of prompts: files, Hugging Face datasets, and tasks that reasoning-gym generates.

A source yields plain rows without tokenising them; ``PromptDataModule`` renders and tokenises them.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlplug.data.columns import DEFAULT_ANSWER_KEY, DEFAULT_PROMPT_KEY, Columns
from rlplug.data.rows import PromptRow as PromptRow
from rlplug.data.rows import RowStream
from rlplug.data.rows import check_row as check_row
from rlplug.errors import ConfigError, did_you_mean, encodable
from rlplug.types.ranges import Count, Rows, Seed, Steps, check_ranges


class PromptSource(ABC):
    """Base class of prompt sources: a finite, ordered collection of tasks."""

    @abstractmethod
    def rows(self) -> Iterator[PromptRow]:
        """Yield every row, in the same order and with the same uids each time and on every rank.

        Raises:
            ConfigError: The source cannot be read; the message says what to write instead.
        """

    def stream(self) -> RowStream | None:
        """Return the rows as a stream to read while training, or ``None`` when all are read at the start."""
        return None

    def parts(self) -> Mapping[str, PromptSource]:
        """Return the sources of a mixture by name; of another source itself, under an empty name."""
        return {"": self}


class FileSource(PromptSource):
    """Prompts from a JSONL or parquet file; fields other than prompt and answer become the row's metadata.

    Rows are named ``train.jsonl:17``, where 17 is the line (the row in parquet), counted from 1.

    Args:
        path: File that ends in ``.jsonl`` (one JSON object a line) or ``.parquet``.
        prompt_key: Field with the prompt: text, or a list of messages with ``role`` and ``content``.
        answer_key: Field with the reference answer. The default may be absent from a row, whose answer is then
            ``None``; a field that you name must be there.
        limit: Read only this many rows from the start; by default all.
        columns: New names of columns, by their names, such as ``{question: prompt, solution: answer}``; every other
            option uses the new names, and rewards find the rest in ``metadata`` by them.
        template: Text of the prompt with columns in braces, such as ``"{question}\\nAnswer:"``, in place of
            ``prompt_key``; ``{{`` and ``}}`` are braces.
        system_prompt: System message in front of each prompt of this source, which becomes chat messages.
    """

    def __init__(
        self,
        path: str,
        prompt_key: str = DEFAULT_PROMPT_KEY,
        answer_key: str = DEFAULT_ANSWER_KEY,
        limit: Rows | None = None,
        columns: dict[str, str] | None = None,
        template: str | None = None,
        system_prompt: str | None = None,
    ) -> None:
        self.path = path
        self.limit = limit
        check_ranges(self)
        self.columns = Columns(prompt_key, answer_key, dict(columns or {}), template, system_prompt)

    def rows(self) -> Iterator[PromptRow]:
        path = Path(self.path).expanduser()
        readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
        if path.suffix not in readers:
            raise ConfigError(
                f"data source path {self.path!r} ends in {path.suffix!r}: give a .jsonl file (one JSON object a line) "
                "or a .parquet file."
            )
        if not path.is_file():
            raise ConfigError(f"data source path {self.path!r} is not a file: give the path of a file that exists.")
        is_empty = True
        for number, fields in itertools.islice(readers[path.suffix](path), self.limit):
            is_empty = False
            yield PromptRow(f"{encodable(path.name)}:{number}", *self.columns.read(fields, f"{path}:{number}"))
        if is_empty:
            raise ConfigError(f"data source path {self.path!r} is empty: give a file with at least one prompt.")


class HFDatasetSource(PromptSource):
    """Prompts from a Hugging Face dataset; columns other than prompt and answer become the row's metadata.

    Rows are named ``gsm8k/main/train:17``, where 17 is the index in that split, counted from 0.

    Args:
        path: Name on the Hugging Face Hub, a folder written by ``save_to_disk``, or a folder of data files.
        name: Configuration of the dataset, such as ``main`` of ``openai/gsm8k``.
        split: Split to read.
        prompt_key: Column with the prompt: text, or a list of messages with ``role`` and ``content``.
        answer_key: Column with the reference answer. The default may be absent, and answers are then ``None``; a
            column that you name must be there.
        limit: Read only this many rows from the start; by default all.
        columns: New names of columns, by their names, such as ``{question: prompt, solution: answer}``; every other
            option uses the new names, and rewards find the rest in ``metadata`` by them.
        template: Text of the prompt with columns in braces, such as ``"{question}\\nAnswer:"``, in place of
            ``prompt_key``; ``{{`` and ``}}`` are braces.
        system_prompt: System message in front of each prompt of this source, which becomes chat messages.
        streaming: Read the rows of ``data.train`` while training, without downloading or indexing the data set first;
            it needs ``model.num_steps``.
        shuffle_buffer: With ``streaming``, rows of a block, in which rows are shuffled and which memory holds.
    """

    def __init__(
        self,
        path: str,
        name: str | None = None,
        split: str = "train",
        prompt_key: str = DEFAULT_PROMPT_KEY,
        answer_key: str = DEFAULT_ANSWER_KEY,
        limit: Rows | None = None,
        columns: dict[str, str] | None = None,
        template: str | None = None,
        system_prompt: str | None = None,
        streaming: bool = False,
        shuffle_buffer: Count = 1000,
    ) -> None:
        self.path = path
        self.name = name
        self.split = split
        self.limit = limit
        self.streaming = streaming
        self.shuffle_buffer = shuffle_buffer
        check_ranges(self)
        self.columns = Columns(prompt_key, answer_key, dict(columns or {}), template, system_prompt)

    def rows(self) -> Iterator[PromptRow]:
        if (stream := self.stream()) is not None:
            stream.begin(None)
            yield from iter(stream.read, None)
            return
        prefix = self._prefix()
        for index, fields in enumerate(itertools.islice(self._load(), self.limit)):
            uid = f"{prefix}:{index}"
            yield PromptRow(uid, *self.columns.read(fields, f"data source {uid}"))

    def stream(self) -> RowStream | None:
        if not self.streaming:
            return None
        from rlplug.data.dataset_rows import DatasetRows

        return DatasetRows(self._load(), self._prefix(), self.columns, self.limit, self.shuffle_buffer)

    def _prefix(self) -> str:
        folder = Path(self.path).expanduser()
        title = folder.name if folder.is_dir() else self.path
        return "/".join(part for part in (title, self.name, self.split) if part)

    def _load(self) -> Any:
        datasets = _optional_import("datasets", "datasets", "HFDatasetSource")
        folder = Path(self.path).expanduser()
        try:
            if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
                if self.streaming:
                    raise ConfigError(
                        f"data source path {self.path!r} is a folder written by save_to_disk, which is read from "
                        "the disk as it is needed: leave out streaming."
                    )
                return self._split_of_saved(datasets.load_from_disk(str(folder)))
            path = str(folder) if folder.is_dir() else self.path
            return datasets.load_dataset(path, self.name, split=self.split, streaming=self.streaming)
        except ConfigError:
            raise
        # RuntimeError: a script-based data set, which datasets no longer runs; IndexError: a saved one without rows
        except (OSError, ValueError, RuntimeError, IndexError, datasets.exceptions.DatasetsError) as error:
            asked = f"path {self.path!r}, name {self.name!r}, split {self.split!r}"
            cause = f" ({error.__cause__})" if error.__cause__ else ""
            raise ConfigError(f"data source {asked} cannot be loaded by datasets: {error}{cause}") from error

    def _split_of_saved(self, saved: Any) -> Any:
        """Return the configured split of a folder that ``save_to_disk`` wrote."""
        if self.name is not None:
            raise ConfigError(
                f"data source path {self.path!r} is a folder written by save_to_disk, which has no configurations: "
                f"leave out name (now {self.name!r})."
            )
        # a data set that was never part of a dictionary has no split name, and "train" is our default for it
        splits = list(saved) if isinstance(saved, dict) else [str(saved.split or "train")]
        if self.split not in splits:
            raise ConfigError(
                f"data source path {self.path!r} has no split {self.split!r}, only {', '.join(splits)}."
                f"{did_you_mean(self.split, splits)} To read a part of a split, use limit."
            )
        return saved[self.split] if isinstance(saved, dict) else saved


class ReasoningGymSource(PromptSource):
    """Verifiable puzzles that reasoning-gym generates, the same ones for the same task, size, seed and options.

    The row's metadata has ``task`` and the whole reasoning-gym ``entry``, which its scorers need.

    Args:
        task: Name of a reasoning-gym data set, such as ``chain_sum``.
        size: Number of puzzles to generate.
        seed: Seed of the first puzzle; puzzle ``i`` has seed + i. Seeds of training and validation must be at least
            ``size`` apart, or both get the same puzzles.
        config: Options of the task, such as ``{min_terms: 2, max_terms: 3}``.
        instruction: Text that follows each question on a line of its own, such as how to mark the final answer.
    """

    def __init__(
        self,
        task: str,
        size: Steps = 1000,
        seed: Seed = 0,
        config: dict[str, Any] | None = None,
        instruction: str | None = None,
    ) -> None:
        self.task = task
        self.size = size
        self.seed = seed
        check_ranges(self)
        self.config = dict(config or {})
        self.instruction = instruction

    def rows(self) -> Iterator[PromptRow]:
        dataset = self._create()
        for index in range(self.size):
            entry = dataset[index]
            question = entry["question"]
            yield PromptRow(
                uid=f"{self.task}/seed={self.seed}:{index}",
                prompt=question if self.instruction is None else f"{question}\n{self.instruction}",
                answer=entry["answer"],
                metadata={"task": self.task, "entry": entry},
            )

    def _create(self) -> Any:
        reasoning_gym = _optional_import("reasoning_gym", "'rlplug[reasoning]'", "ReasoningGymSource")
        registered: Mapping[str, tuple[type, type]] = reasoning_gym.factory.DATASETS
        if self.task not in registered:
            raise ConfigError(
                f"data source task {self.task!r} is not a reasoning-gym task.{did_you_mean(self.task, registered)} "
                f"There are {', '.join(sorted(registered))}."
            )
        options = {field.name for field in dataclasses.fields(registered[self.task][1])} - {"size", "seed"}
        for option in self.config:
            if option in ("size", "seed"):
                raise ConfigError(f"data source config of {self.task!r} has {option!r}: write it beside config.")
            if option not in options:
                raise ConfigError(
                    f"data source config of {self.task!r} has no option {option!r}.{did_you_mean(option, options)} "
                    f"Its options are {', '.join(sorted(options))}."
                )
        try:
            return reasoning_gym.create_dataset(self.task, size=self.size, seed=self.seed, **self.config)
        # the tasks validate their options with assert, or fail while comparing them
        except (AssertionError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"data source config of {self.task!r}, {self.config}, is refused: {error}. Correct these options."
            ) from error


def _optional_import(module: str, requirement: str, needed_by: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{needed_by} needs {module} ({error}): run pip install {requirement}") from error


def _read_jsonl(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield line numbers, counted from 1, and objects; blank lines are skipped."""
    # in binary, so that an error can name a line that is not UTF-8
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}:{number} is not valid JSON: {error}") from error
            except RecursionError as error:
                raise ConfigError(f"{path}:{number} is JSON of too many levels of brackets.") from error
            if not isinstance(fields, dict):
                raise ConfigError(
                    f"{path}:{number} is a JSON {type(fields).__name__}: each line must be an object, such as "
                    '{"prompt": "1 + 1 =", "answer": "2"}.'
                )
            yield number, fields


def _read_parquet(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield row numbers, counted from 1, and rows."""
    parquet = _optional_import("pyarrow.parquet", "pyarrow", f"data source path {str(path)!r}")
    try:
        file = parquet.ParquetFile(path)
    # pyarrow's ArrowInvalid is a ValueError
    except (OSError, ValueError) as error:
        raise ConfigError(f"data source path {str(path)!r} is not a valid parquet file: {error}") from error
    with file:
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in file.iter_batches())
        yield from enumerate(rows, start=1)
