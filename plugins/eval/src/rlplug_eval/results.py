"""Results of an evaluation, from its completions: figures of each policy and source, and paired differences."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rlplug.distributed.durable_files import write_file
from rlplug.observability.intervals import Estimate, mean_over, share_over
from rlplug.training.validation.scores import pass_at_k
from rlplug.types import reaches
from rlplug_eval.card import markdown_text
from rlplug_eval.folder import EvalFolder, EvalRecord, Row
from rlplug_eval.statistics import paired

RESULTS: Final = "results.json"
TABLE: Final = "results.md"
METHODS: Final = (
    "Intervals are of 95%, over prompts, from four prompts on: for pass@k, and for rewards of two values, a Bayesian "
    "bootstrap with Jeffreys' prior, for other means Student's t. Differences are paired by prompt. pass@k is the "
    "unbiased estimate of arXiv:2107.03374, equation 1. A completion whose reward failed counts as an error and as no "
    "pass, and in no other figure."
)


@dataclass(frozen=True)
class Group:
    """The completions of one prompt."""

    uid: str
    rows: tuple[Row, ...]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the completions that have one."""
        return [row.reward for row in self.rows if row.reward is not None]

    def mean_reward(self) -> float | None:
        return math.fsum(self.rewards) / len(self.rewards) if self.rewards else None

    def mean_length(self) -> float | None:
        """Return the mean tokens of the completions that have a reward; ``None`` where none has."""
        lengths = [row.num_tokens for row in self.rows if row.reward is not None]
        return math.fsum(lengths) / len(lengths) if lengths else None

    def pass_at(self, k: int, threshold: float) -> float:
        """Return the estimate of pass@k; a completion whose reward failed is no pass."""
        return pass_at_k(len(self.rows), sum(reaches(reward, threshold) for reward in self.rewards), k)


@dataclass(frozen=True)
class Result:
    """Figures of a policy on a source."""

    policy: str
    data: str
    num_prompts: int
    """Prompts with all their completions."""
    num_wanted: int | None
    """Prompts of the source; ``None`` where they were not read yet."""
    num_samples: int
    """Completions."""
    num_errors: int
    """Completions without a reward."""
    first_error: str
    pass_at: dict[int, Estimate | None]
    reward: Estimate | None
    length: Estimate | None
    """Tokens that the policy generated, of a completion that has a reward, as in what follows."""
    truncated_share: float | None
    """Share of completions that a limit of tokens or turns cut."""
    turns: float | None
    reward_counts: dict[str, float | None]
    """What the rewards counted, such as ``judge/requests``; ``None`` where that is no finite number."""


@dataclass(frozen=True)
class Difference:
    """A policy less the baseline, on the prompts that both have completed."""

    policy: str
    baseline: str
    data: str
    pass_at: dict[int, Estimate | None]
    reward: Estimate | None
    num_better: int
    """Prompts on which the policy's mean reward is higher."""
    num_worse: int


@dataclass(frozen=True)
class Results:
    """All figures of an evaluation."""

    results: list[Result]
    differences: list[Difference]
    groups: Mapping[tuple[str, str], Mapping[str, Group]]
    """Completions by policy and source, and by prompt."""


def compute(record: EvalRecord, rows: Mapping[tuple[str, str], Sequence[Row]]) -> Results:
    """Return the figures of all completions that there are."""
    groups = {key: _grouped(found) for key, found in rows.items()}
    names, sources = ([each["name"] for each in part] for part in (record.policies, record.data))
    results = [_result(record, policy, data, groups[policy, data]) for data in sources for policy in names]
    baseline = names[0]
    differences = [
        _difference(record, policy, baseline, data, groups[policy, data], groups[baseline, data])
        for data in sources
        for policy in names[1:]
    ]
    return Results(results, differences, groups)


def write_results(folder: EvalFolder, results: Results) -> None:
    """Write ``results.json`` and ``results.md``."""
    record = folder.record
    content = {
        "status": record.status,
        "options": asdict(record.options),
        "policies": [{**policy, "source": record.sources.get(policy["name"])} for policy in record.policies],
        "data": record.data,
        "rewards": record.reward_notes,
        "methods": METHODS,
        "results": [asdict(result) for result in results.results],
        "differences": [asdict(difference) for difference in results.differences],
    }
    write_file(folder.path / RESULTS, json.dumps(content, indent=2, allow_nan=False))
    write_file(folder.path / TABLE, markdown(record, results))


def markdown(record: EvalRecord, results: Results) -> str:
    """Return the tables in Markdown."""
    lines = ["# Evaluation", "", f"{record.options.sentence()}.", ""]
    if record.status != "finished":
        lines += [f"This evaluation is {record.status}: the figures are of the completions so far.", ""]
    for policy in record.policies:
        source = record.sources.get(policy["name"], policy["argument"])
        lines.append(f"- {markdown_text(policy['name'])}: {markdown_text(source)}")
    lines += [f"- {markdown_text(note)}" for note in record.reward_notes]
    for data in record.data:
        mine = [result for result in results.results if result.data == data["name"]]
        lines += ["", f"## {markdown_text(data['name'])}", "", *_markdown_table(*result_table(mine))]
        differences = [each for each in results.differences if each.data == data["name"]]
        if differences:
            lines += ["", f"Less {markdown_text(differences[0].baseline)}, on the same prompts:", ""]
            lines += _markdown_table(*difference_table(differences))
    return "\n".join([*lines, "", METHODS, ""])


def result_table(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of the figures of one source, as texts."""
    ks = list(results[0].pass_at)
    has_turns = any(result.turns is not None and result.turns != 1 for result in results)
    columns = ["policy", "prompts", *(f"pass@{k}" for k in ks), "reward", "length", "truncated", "errors"]
    counts = sorted({name for result in results for name in result.reward_counts})
    rows = []
    for result in results:
        wanted = "" if result.num_wanted in (None, result.num_prompts) else f" of {result.num_wanted:,}"
        rows.append(
            [
                result.policy,
                f"{result.num_prompts:,}{wanted}",
                *(share(result.pass_at[k]) for k in ks),
                figure(result.reward, 3),
                figure(result.length, 1),
                "-" if result.truncated_share is None else f"{100 * result.truncated_share:.1f}%",
                f"{result.num_errors:,} of {result.num_samples:,}" if result.num_errors else "0",
                *([f"{result.turns or 0:.2f}"] if has_turns else []),
                *(_count(result.reward_counts.get(name, 0.0)) for name in counts),
            ]
        )
    return columns + ["turns"] * has_turns + counts, rows


def difference_table(differences: Sequence[Difference]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of the differences on one source, as texts."""
    ks = list(differences[0].pass_at)
    columns = ["policy", *(f"pass@{k}" for k in ks), "reward", "prompts better / worse"]
    rows = [
        [
            each.policy,
            *(share(each.pass_at[k], signed=True) for k in ks),
            figure(each.reward, 3, signed=True),
            f"{each.num_better:,} / {each.num_worse:,}",
        ]
        for each in differences
    ]
    return columns, rows


def turned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return a table with a column for each policy: figures with intervals side by side are wider than terminals."""
    first, *others = map(list, zip(columns, *rows, strict=True))
    return first, [*others]


def share(estimate: Estimate | None, signed: bool = False) -> str:
    """Return an estimate as per cent with its interval."""
    return _with_interval(estimate, lambda value: f"{100 * value:{'+' * signed}.1f}%")


def figure(estimate: Estimate | None, digits: int, signed: bool = False) -> str:
    """Return an estimate with its interval."""
    return _with_interval(estimate, lambda value: f"{value:{'+' * signed},.{digits}f}")


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value.is_integer() else f"{value:,.6g}"


def _with_interval(estimate: Estimate | None, text: Any) -> str:
    if estimate is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return str(text(estimate.mean))
    return f"{text(estimate.mean)} ({text(estimate.low)} to {text(estimate.high)})"


def _grouped(rows: Sequence[Row]) -> dict[str, Group]:
    by_uid: dict[str, list[Row]] = {}
    for row in rows:
        by_uid.setdefault(row.uid, []).append(row)
    return {uid: Group(uid, tuple(found)) for uid, found in by_uid.items()}


def _result(record: EvalRecord, policy: str, data: str, groups: Mapping[str, Group]) -> Result:
    rows = [row for group in groups.values() for row in group.rows]
    options, failed = record.options, [row for row in rows if row.reward is None]
    scored = [row for row in rows if row.reward is not None]
    wanted = record.prompts.get(f"{policy}/{data}")
    means = _present([group.mean_reward() for group in groups.values()])
    return Result(
        policy=policy,
        data=data,
        num_prompts=len(groups),
        num_wanted=None if wanted is None else int(wanted["number"]),
        num_samples=len(rows),
        num_errors=len(failed),
        first_error=failed[0].error if failed else "",
        pass_at={
            k: share_over([group.pass_at(k, options.pass_threshold) for group in groups.values()]) for k in options.ks
        },
        reward=mean_over(means, _rewards(groups.values())),
        length=mean_over(_present([group.mean_length() for group in groups.values()])),
        truncated_share=sum(row.finish_reason == "length" for row in scored) / len(scored) if scored else None,
        turns=sum(row.num_turns for row in scored) / len(scored) if scored else None,
        reward_counts={
            name: value if math.isfinite(value) else None
            for name, value in record.reward_counts.get(f"{policy}/{data}", {}).items()
        },
    )


def _difference(
    record: EvalRecord,
    policy: str,
    baseline: str,
    data: str,
    groups: Mapping[str, Group],
    others: Mapping[str, Group],
) -> Difference:
    pairs = [(group, others[uid]) for uid, group in groups.items() if uid in others]
    rewards = [
        (first, second)
        for mine, other in pairs
        if (first := mine.mean_reward()) is not None and (second := other.mean_reward()) is not None
    ]
    of_samples = _rewards(group for pair in pairs for group in pair)
    threshold = record.options.pass_threshold
    return Difference(
        policy=policy,
        baseline=baseline,
        data=data,
        pass_at={
            k: paired([(mine.pass_at(k, threshold), other.pass_at(k, threshold)) for mine, other in pairs], share_over)
            for k in record.options.ks
        },
        reward=paired(rewards, lambda values: mean_over(values, of_samples)),
        num_better=sum(mine > other for mine, other in rewards),
        num_worse=sum(mine < other for mine, other in rewards),
    )


def _rewards(groups: Iterable[Group]) -> list[float]:
    return [reward for group in groups for reward in group.rewards]


def _present(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return ["| " + " | ".join(map(markdown_text, line)) + " |" for line in lines]
