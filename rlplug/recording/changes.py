"""What differs between a run and the checkpoint that it resumes from, in one table, and what of it is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rlplug.data.sources import PromptSource
from rlplug.distributed.checkpoints.files import run_dir_of
from rlplug.plugin_manager import plugins
from rlplug.recording.provenance import flat
from rlplug.training.batch_plan import ROWS, TOKEN_BUDGETS

_REFUSED: Final = {
    "seed_everything": "the random generators go on from the checkpoint",
    "run.dir": "the run goes on in the folder of its checkpoint",
    "model.lora.rank": "the checkpoint's adapters have it",
    "model.lora.alpha": "it would scale what the adapters have learned",
    "model.optimizer.class_path": "the checkpoint has no state for it",
    "model.critic.optimizer.class_path": "the checkpoint has no state for it",
}
"""Reason for which a resumed run cannot follow a change of a key."""
_DECIDES: Final = ("model", "data", "model.limits.max_grad_norm", "model.limits.on_nonfinite")
_DOES_NOT: Final = (
    *("data.val", "model.num_steps", "model.validation", "model.limits", "model.memory", "model.optimizations"),
    *("model.weight_sync.bucket_mib", "model.rollout.init_args", "model.batch.share_prefixes"),
    *(*TOKEN_BUDGETS, ROWS, f"{ROWS}_forward"),
    "model.trainer",  # of another one the weights have other names, which their reader refuses
)
"""Keys, and those below, that decide the numbers of the next step, and that do not but for rounding. The longest one
that a key is below counts; a key below none does not."""
_LIBRARIES: Final = r"rlplug|torch|transformers|(sglang|tensorrt|vllm)([-_].+)?"
"""Names of distributions that compute, beside plugins; of two versions none promises the same numbers."""
_OF_OPTIMIZERS: Final = tuple(f"model{of}.{each}" for of in ("", ".critic") for each in ("optimizer.", "lr_scheduler"))
_MOST_LINES: Final = 20

Effect = Literal["refused", "stops", "allowed", "noted"]
_EFFECTS: Final[Sequence[Effect]] = ("refused", "stops", "allowed", "noted")


@dataclass(frozen=True)
class Change:
    """A difference.

    Attributes:
        key: Key of the configuration, or section of the provenance and name: ``code examples/reward.py``.
        effect: Whether it cannot be followed; ends exactness, and stops the run or is allowed to; or is noted.
        reason: Why it is refused.
    """

    key: str
    old: Any
    new: Any
    effect: Effect
    reason: str = ""

    def __str__(self) -> str:
        because = f" (cannot change: {self.reason})" if self.reason else ""
        return f"{self.key}: {_short(self.old)} -> {_short(self.new)}{because}"


@dataclass(frozen=True)
class Changes:
    """Differences between a checkpoint and the run that resumes from it, the gravest first."""

    checkpoint: Path
    rows: Sequence[Change]
    is_recorded: bool = True  # more than the configuration

    @property
    def has_optimizer_options(self) -> bool:
        """Whether the optimizers or their schedulers have other options."""
        return any(row.key.startswith(_OF_OPTIMIZERS) for row in self.rows)

    @property
    def lines(self) -> list[str]:
        """The table; no lines where nothing differs."""
        shown = [f"  {row.effect:<8} {row}" for row in self.rows]
        if len(shown) > _MOST_LINES:
            shown = [*shown[:_MOST_LINES], f"  and {len(shown) - _MOST_LINES} more"]
        unknown = f"{self.checkpoint} recorded nothing but its configuration to compare: an older version wrote it"
        table = ["changed since the checkpoint:", *shown] if shown else []
        return table if self.is_recorded else [unknown, *table]

    def recorded(self, record: Path) -> list[dict[str, str]]:
        """Return the changes of earlier resumes, of which a ``run.json`` tells, and these, as the next one has them."""
        try:
            former = list(json.loads(record.read_bytes()).get("changes", []))
        except (OSError, ValueError, AttributeError):
            former = []
        since = self.checkpoint.name
        return [*former, *({"since": since, "effect": row.effect, "what": str(row)} for row in self.rows)]

    @property
    def problem(self) -> str | None:
        """Why the run cannot resume, with the table and the keys that allow it; ``None`` where it can."""
        stops = dict.fromkeys(section(row.key) for row in self.rows if row.effect == "stops")
        is_refused = any(row.effect == "refused" for row in self.rows)
        if not stops and not is_refused:
            return None
        allow = "start a new run" if is_refused else f"allow it: --run.allow_changes '[{', '.join(stops)}]'"
        return "\n".join([f"{self.checkpoint} is of a run with other numbers. Undo it, or {allow}.", *self.lines])


def changes_since(
    checkpoint: Path,
    configs: tuple[Mapping[str, Any], Mapping[str, Any]],
    records: tuple[Mapping[str, Mapping[str, str]] | None, Mapping[str, Mapping[str, str]]],
    allowed: Sequence[str] = (),
    needs_weights: bool = True,
    of_engine: Collection[str] = (),
) -> Changes:
    """Compare a checkpoint with the run that resumes from it.

    Args:
        configs: Configurations of both; empty for a run from Python.
        records: :func:`~rlplug.recording.provenance.provenance` of both; ``None`` where the checkpoint has none.
        allowed: ``run.allow_changes``.
        needs_weights: Whether the run reads weights of model folders that the checkpoint does not hold.
        of_engine: Options of the engine that decide numbers.
    """
    old, new = records
    same_versions = old is not None and old.get("versions") == new["versions"]
    rows = [*_of_configs(checkpoint, *configs, same_versions, of_engine), *_of_records(old or {}, new, needs_weights)]
    for index, row in enumerate(rows):
        if row.effect == "stops" and _nearest(row.key.split(" ")[0], allowed):
            rows[index] = Change(row.key, row.old, row.new, "allowed")
    return Changes(checkpoint, sorted(rows, key=lambda row: _EFFECTS.index(row.effect)), old is not None)


def section(key: str) -> str:
    """Return the part of a change's key that allows it: ``model.algorithm`` for its options, ``data``, ``code``."""
    parts = key.split(" ")[0].split(".")
    return ".".join(parts[: 2 if parts[0] == "model" else 1])


def _of_configs(
    checkpoint: Path, old: Mapping[str, Any], new: Mapping[str, Any], same_versions: bool, of_engine: Collection[str]
) -> Iterator[Change]:
    was, now = dict(flat(old)), dict(flat(new))
    deciding = (*_DECIDES, *(f"model.rollout.init_args.{each}" for each in of_engine))
    changed = sorted(key for key in was.keys() | now.keys() if was.get(key) != now.get(key))
    others = [key.removesuffix("class_path") for key in changed if key.endswith(".class_path")]
    for key in changed:
        in_both = key in was and key in now
        if key.startswith(("run.allow_changes", *(f"{each}init_args." for each in others))):
            continue  # of another class, all options are others
        reason = _REFUSED.get(key) if in_both and (key != "run.dir" or run_dir_of(checkpoint)) else None
        is_new = not (in_both or same_versions or key.endswith("class_path"))  # an option of another version
        decides = not is_new and _nearest(key, (*deciding, *_DOES_NOT)) in deciding
        effect: Effect = "refused" if reason else "stops" if decides else "noted"
        yield Change(key, was.get(key), now.get(key), effect, reason or "")


def _nearest(key: str, among: Sequence[str]) -> str:
    """Return the longest of the keys that ``key`` is or is below, or an empty text."""
    return max((each for each in among if f"{key}.".startswith(f"{each}.")), key=len, default="")


def _of_records(
    old: Mapping[str, Mapping[str, str]], new: Mapping[str, Mapping[str, str]], needs_weights: bool
) -> Iterator[Change]:
    for name in sorted(old.keys() & new.keys()):
        was, now = old[name], new[name]
        keys = was.keys() & now.keys() if name == "code" else was.keys() | now.keys()  # other code may be imported yet
        for key in sorted(key for key in keys if was.get(key) != now.get(key)):
            unused = name == "data.val" or (key.endswith(".safetensors") and not needs_weights)
            computes = name != "versions" or (key in was and key in now and _computes(key))
            effect: Effect = "stops" if computes and not unused else "noted"
            yield Change(f"{name} {key}", was.get(key), now.get(key), effect)


def _computes(name: str) -> bool:
    """Return whether a run's numbers come from a distribution: a library's, or a plugin's with a part of the step."""
    sources = {each.__module__ for each in PromptSource.__subclasses__()}
    return bool(re.fullmatch(_LIBRARIES, name)) or any(
        each.kind not in ("classes", "launchers") or each.place.partition(":")[0] in sources
        for each in plugins().registry.by_distribution().get(name, ())
    )


def _short(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
