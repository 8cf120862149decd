"""JSON of samples and of their tokens."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from rlplug.distributed.durable_files import reason
from rlplug.errors import RunError
from rlplug_watch.page.folders import RUNS, Runs
from rlplug_watch.page.sample_index import SORTS, SampleFilter, SampleIndex, SampleLine, search
from rlplug_watch.page.token_view import TokenIndex, as_numbers, view
from rlplug_watch.token_log.files import FOLDER
from rlplug_watch.token_log.step_tokens import StepTokens

SAMPLES: Final = "samples.jsonl"
SECONDS: Final = 0.8
"""Longest time that a request reads files, each for the index and for texts."""
MOST_RUNS: Final = 16
"""Runs whose indexes are kept."""
LIMIT: Final = 50
MOST_SAMPLES: Final = 200
MOST_OF_GROUP: Final = 256
EXCERPT: Final = 400
"""Characters of a text in a list."""
MOST_TEXT: Final = 200_000
"""Characters of a text elsewhere."""


@dataclass(frozen=True)
class RunSamples:
    """What was read of a run's samples and tokens."""

    index: SampleIndex | None
    """``None`` where there is no ``samples.jsonl``."""
    tokens: TokenIndex


class SamplePages:
    """Answers of the pages of samples, with the indexes of the runs that were asked for last."""

    def __init__(self) -> None:
        self._known: dict[Path, RunSamples] = {}
        self._lock = threading.Lock()

    def of_run(self, runs: Runs, run_id: str) -> RunSamples:
        """Return a run's indexes.

        Raises:
            HTTPNotFound: There is no such run.
        """
        folder = runs.folder(run_id)
        if folder is None:
            raise web.HTTPNotFound(text=f"there is no run {run_id!r} below {runs.root}")
        path = runs.file(run_id, SAMPLES)
        with self._lock:  # requests are answered in threads
            found = self._known.pop(folder, None)
            if found is None or (found.index is None) != (path is None):
                has_tokens = lambda path: runs.file(run_id, f"{FOLDER}/{path.name}") is not None  # noqa: E731
                found = RunSamples(None if path is None else SampleIndex(path), TokenIndex(folder / FOLDER, has_tokens))
            self._known[folder] = found
            for old in list(self._known)[:-MOST_RUNS]:
                del self._known[old]
        return found

    def samples(self, run: RunSamples, query: Query) -> Any:
        """Return a page of samples that fit, and how far the file was searched."""
        if run.index is None:
            return {"problem": f"There is no {SAMPLES}: the run has logged no samples.", "rows": []}
        wanted, sort = query.filter(), query.choice("sort", SORTS) or "newest"
        start, limit = query.whole("start") or 0, min(query.whole("limit") or LIMIT, MOST_SAMPLES)
        with run.index.lock:
            run.index.grow(SECONDS)
            found = search(run.index, wanted, sort, start, limit, SECONDS)
            rows, index = run.index.rows, run.index
            return {
                "rows": [summary(sample) for _, sample in found.samples],
                "num_samples": len(rows),
                "num_candidates": found.num_candidates,
                "num_searched": found.num_searched,
                "next": found.next if found.next < found.num_candidates else None,
                "reads_texts": wanted.reads_texts,
                "num_unreadable": index.num_unreadable,
                "bytes_indexed": index.num_bytes_read,
                "bytes": index.num_bytes,
                "first_step": int(rows["step"].min()) if len(rows) else None,
                "last_step": int(rows["step"].max()) if len(rows) else None,
            }

    def group(self, run: RunSamples, query: Query) -> Any:
        """Return the completions of a prompt in a step that were logged, the best first, each with its tokens' numbers.

        Raises:
            HTTPNotFound: None was.
        """
        step, group = query.whole("step"), query.whole("group")
        if step is None or run.index is None:
            raise web.HTTPNotFound(text="give the step of a run with samples")
        uid = query.text("uid") if group is None else None
        wanted = SampleFilter(phase=query.text("phase"), first_step=step, last_step=step, group=group, uid=uid)
        with run.index.lock:
            run.index.grow(SECONDS)
            found = search(run.index, wanted, "-reward", 0, MOST_OF_GROUP, SECONDS)
        if not found.samples:
            raise web.HTTPNotFound(text=f"no sample of this group is logged in step {step}")
        tokens = run.tokens.read(step) if any(sample.has_tokens for _, sample in found.samples) else None
        return {
            "step": step,
            "samples": [whole(sample) | {"tokens": _token_facts(tokens, sample)} for _, sample in found.samples],
        }

    def tokens(self, run: RunSamples, query: Query) -> Any:
        """Return the tokens of a completion, with its line of ``samples.jsonl`` where that is there.

        Raises:
            HTTPNotFound: They are not in the token log.
        """
        step, group, index = (query.part(name) for name in ("step", "group", "index"))
        tokens = run.tokens.read(step)
        number = None if tokens is None else tokens.find(group, index)
        if tokens is None or number is None:
            raise web.HTTPNotFound(text=self._why_no_tokens(run, step, tokens))
        sample, siblings = None, []
        if run.index is not None:
            wanted = SampleFilter(phase="train", first_step=step, last_step=step, group=group)
            with run.index.lock:
                run.index.grow(SECONDS)
                found = search(run.index, wanted, "-reward", 0, MOST_OF_GROUP, SECONDS)
            sample = next((whole(sample) for _, sample in found.samples if sample.index == index), None)
            siblings = [
                {"index": sample.index, "reward": _number(sample.reward)}
                for _, sample in found.samples
                if sample.index is not None and tokens.find(group, sample.index) is not None
            ]
        start = query.whole("start") or 0
        return {"step": step, "group": group, "index": index, "sample": sample, "siblings": siblings} | view(
            tokens, number, start
        )

    def _why_no_tokens(self, run: RunSamples, step: int, tokens: StepTokens | None) -> str:
        steps = sorted(run.tokens.records()[0])
        if not steps:
            return f"There is no token log: run.token_samples_per_step was 0, or the folder {FOLDER}/ is gone."
        if tokens is None:
            return (
                f"Step {step} has no tokens; {len(steps)} steps from {steps[0]} to {steps[-1]} have some "
                "(run.token_every_n_steps, run.token_log_mib)."
            )
        return f"The tokens of this completion were not logged in step {step} (run.token_samples_per_step)."


def summary(sample: SampleLine) -> dict[str, Any]:
    """Return a sample as a list shows it: the end of its prompt, and the beginning of its completion."""
    turns = (f"{turn.get('role', '')}: {turn.get('text', '')}" for turn in sample.turns[:MOST_SAMPLES])
    completion = "\n".join(turns) or sample.completion
    return _numbers(sample) | {
        "prompt": sample.prompt[-EXCERPT:],
        "completion": completion[:EXCERPT],
        "is_cut": [len(sample.prompt) > EXCERPT, len(completion) > EXCERPT],
    }


def whole(sample: SampleLine) -> dict[str, Any]:
    """Return a sample with its texts, up to ``MOST_TEXT`` characters."""
    answer = sample.answer_text
    return _numbers(sample) | {
        "prompt": sample.prompt[-MOST_TEXT:],
        "completion": sample.completion[:MOST_TEXT],
        "is_cut": [len(sample.prompt) > MOST_TEXT, len(sample.completion) > MOST_TEXT],
        "answer": None if answer is None else answer[:MOST_TEXT],
        "turns": [
            {"role": turn.get("role", "")[:EXCERPT], "text": turn.get("text", "")[:MOST_TEXT]}
            for turn in sample.turns[:MOST_SAMPLES]
        ],
    }


def _numbers(sample: SampleLine) -> dict[str, Any]:
    errors = {name[:EXCERPT]: text[:EXCERPT] for name, text in list(sample.errors.items())[:MOST_SAMPLES]}
    rewards = {name[:EXCERPT]: _number(value) for name, value in sample.rewards.items() if name not in sample.errors}
    return {
        "step": sample.step,
        "phase": sample.phase[:EXCERPT],
        "prompt_uid": sample.prompt_uid[:EXCERPT],
        "reward": _number(sample.reward),
        "rewards": dict(list(rewards.items())[:MOST_SAMPLES]),
        "errors": errors,
        "finish_reason": sample.finish_reason[:EXCERPT],
        "num_tokens": sample.num_tokens,
        "num_turns": sample.num_turns,
        "policy_version": sample.policy_version,
        "advantage": _number(sample.advantage),
        "group": sample.group,
        "index": sample.index,
        "has_tokens": sample.has_tokens,
    }


def _number(value: Any) -> float | None:
    """Return a number that JSON has, or ``None``."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 and math.isfinite(value) else None


def _token_facts(tokens: StepTokens | None, sample: SampleLine) -> Any:
    """Return texts and advantages of a completion's tokens, for the view of its group; ``None`` without them."""
    if tokens is None or sample.group is None or sample.index is None or not sample.has_tokens:
        return None
    number = tokens.find(sample.group, sample.index)
    if number is None:
        return None
    columns = tokens.of_row(number)
    clipped = columns.get("clipped")
    advantages = columns.get("advantages")
    return {
        "num_clipped": None if clipped is None else int((clipped != 0).sum()),
        "advantage": None if advantages is None else next((v for v in as_numbers(advantages) if v is not None), None),
    }


# ---- requests -----------------------------------------------------------------------------------------------------


class Query:
    """What a request asks for, checked."""

    def __init__(self, request: web.Request) -> None:
        self._request = request

    def text(self, name: str) -> str | None:
        """Return a text of up to 1,000 characters, or ``None`` where it is absent or empty."""
        return self._request.query.get(name, "")[:1000] or None

    def choice(self, name: str, choices: tuple[str, ...]) -> str | None:
        """Return one of some texts, or ``None`` where it is absent."""
        found = self.text(name)
        if found is not None and found not in choices:
            raise web.HTTPBadRequest(text=f"{name} is {found!r}: give one of {', '.join(choices)}")
        return found

    def whole(self, name: str) -> int | None:
        """Return a whole number from 0, or ``None`` where it is absent."""
        found = self.number(name)
        if found is not None and not (found.is_integer() and 0 <= found < 2**31):
            raise web.HTTPBadRequest(text=f"{name} must be a whole number from 0")
        return None if found is None else int(found)

    def number(self, name: str) -> float | None:
        """Return a number, or ``None`` where it is absent."""
        text = self._request.query.get(name, "")
        try:
            found = float(text) if text else None
        except ValueError:
            found = math.nan
        if found is not None and not math.isfinite(found):
            raise web.HTTPBadRequest(text=f"{name} must be a number")
        return found

    def part(self, name: str) -> int:
        """Return a whole number from the address."""
        text = self._request.match_info[name]
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise web.HTTPNotFound(text=f"{name} must be a whole number")
        return int(text)

    def filter(self) -> SampleFilter:
        """Return which samples are asked for."""
        return SampleFilter(
            text=self.text("query") or "",
            phase=self.text("phase"),
            finish=self.text("finish"),
            first_step=self.whole("first_step"),
            last_step=self.whole("last_step"),
            reward_min=self.number("reward_min"),
            reward_max=self.number("reward_max"),
            group=self.whole("group"),
            only_errors=self.text("errors") is not None,
            only_tokens=self.text("tokens") is not None,
        )


def routes() -> list[web.RouteDef]:
    """Return the routes below ``/api/runs/{run}/``."""
    pages = SamplePages()
    return [
        web.get("/api/runs/{run}/samples", _answer(pages, pages.samples)),
        web.get("/api/runs/{run}/group", _answer(pages, pages.group)),
        web.get("/api/runs/{run}/tokens/{step}/{group}/{index}", _answer(pages, pages.tokens)),
    ]


def _answer(pages: SamplePages, read: Callable[[RunSamples, Query], Any]) -> Callable[[web.Request], Any]:
    """Return a handler that reads files in a thread, so that a slow disk holds up no other answer."""

    def answer(request: web.Request) -> str:
        run = pages.of_run(request.app[RUNS], request.match_info["run"])
        try:
            return json.dumps(read(run, Query(request)), allow_nan=False, separators=(",", ":"))
        except OSError as error:
            raise web.HTTPUnprocessableEntity(text=f"the files of the run cannot be read: {reason(error)}") from error
        except RunError as error:
            raise web.HTTPUnprocessableEntity(text=str(error)) from error

    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=await asyncio.to_thread(answer, request), content_type="application/json")

    return handler
