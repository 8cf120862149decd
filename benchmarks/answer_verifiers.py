"""How often verifiers of mathematical answers agree with the truth, on the table of ``plugins/rewards/tests``.

``python benchmarks/answer_verifiers.py --verl FOLDER`` prints a table with a row for each verifier, and one for each
kind. ``FOLDER`` has the unpacked wheel of verl (``pip download --no-deps verl``, ``unzip``); its ``prime_math`` needs
pylatexenc and antlr4-python3-runtime 4.11. Without it, those of math-verify and TRL run. A verifier gets each
accepted answer in turn, in a box where nothing marks it, since all of them read LaTeX there. A late or failed
comparison is a 0.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import signal
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "plugins" / "rewards" / "tests"
LATE_S = 10
Verifier = Callable[[str, str], float]


def rlplug() -> Verifier:
    from rlplug_rewards.answers.extraction import Found, after_thought, marked_answer
    from rlplug_rewards.answers.judging import judge
    from rlplug_rewards.answers.references import as_mathematics

    def score(reference: str, completion: str) -> float:
        rest = after_thought(completion)
        return float(rest is not None and judge([as_mathematics(reference)], marked_answer(rest) or Found(rest, False)))

    return score


def math_verify_defaults() -> Verifier:
    from math_verify import parse, verify

    return lambda reference, completion: float(verify(parse(boxed(reference)), parse(completion)))


def trl_accuracy() -> Verifier:
    from trl.rewards import accuracy_reward

    return lambda reference, completion: float(
        accuracy_reward([[{"role": "assistant", "content": completion}]], [boxed(reference)])[0] or 0
    )


def boxed(reference: str) -> str:
    return reference if any(mark in reference for mark in ("$", "\\boxed", "####")) else f"\\boxed{{{reference}}}"


def verl_scorer(folder: Path, name: str) -> Verifier:
    """Return a scorer of verl without importing verl itself, which needs Ray."""
    scorers = folder / "verl" / "utils" / "reward_score"
    stand_in = types.ModuleType("verl.utils.py_functional")
    stand_in.timeout_limit = lambda *_, **__: lambda function: function  # type: ignore[attr-defined]
    for module in ("verl", "verl.utils"):
        sys.modules.setdefault(module, types.ModuleType(module))
    sys.modules["verl.utils.py_functional"] = stand_in
    path = scorers / name / "__init__.py" if (scorers / name).is_dir() else scorers / f"{name}.py"
    spec = importlib.util.spec_from_file_location(
        f"verl_{name}", path, submodule_search_locations=[str(path.parent)] if path.name == "__init__.py" else None
    )
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    if hasattr(module, "_verify_in_subprocess"):  # its pool of processes cannot import a module that is loaded by path
        return lambda reference, completion: float(module._verify_in_subprocess(f"\\boxed{{{reference}}}", completion))

    def score(reference: str, completion: str) -> float:
        found: Any = module.compute_score(completion, reference)
        if isinstance(found, dict):
            return float(found.get("acc", found["score"]))
        return float(found[0] if isinstance(found, tuple) else found)

    return score


@contextlib.contextmanager
def limit(seconds: int) -> Any:
    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def scored(verifier: Verifier, references: tuple[str, ...], completion: str) -> bool:
    for reference in references:
        with contextlib.suppress(Exception), limit(LATE_S):
            if verifier(reference, completion) > 0.5:
                return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verl", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    from answer_table import pairs

    logging.disable(logging.CRITICAL)
    verifiers = {
        "MathVerify of rlplug": rlplug(),
        "math-verify, defaults": math_verify_defaults(),
        "TRL accuracy_reward": trl_accuracy(),
    }
    if options.verl is not None:
        names = ("math_verify", "prime_math", "math_reward", "math_dapo", "gsm8k")
        verifiers |= {f"verl {name}": verl_scorer(options.verl, name) for name in names}
    table = list(pairs())
    kinds = Counter(pair.kind for pair in table)
    agreed: dict[str, Counter[str]] = {}
    print(f"| verifier | agrees, of {len(table)} | right ones scored 0 | wrong ones scored 1 |\n|---|---|---|---|")
    for name, verifier in verifiers.items():
        found = [scored(verifier, pair.references, pair.completion) for pair in table]
        agreed[name] = Counter(
            pair.kind for pair, is_right in zip(table, found, strict=True) if is_right == pair.is_right
        )
        missed = sum(pair.is_right and not is_right for pair, is_right in zip(table, found, strict=True))
        wrong = sum(is_right and not pair.is_right for pair, is_right in zip(table, found, strict=True))
        print(f"| {name} | {agreed[name].total() / len(table):.1%} | {missed} | {wrong} |", flush=True)
    print(f"\n| kind | pairs | {' | '.join(verifiers)} |\n|---|---|{'---|' * len(verifiers)}")
    for kind, count in kinds.items():
        shares = " | ".join(f"{agreed[name][kind] / count:.0%}" for name in verifiers)
        print(f"| {kind} | {count} | {shares} |")


if __name__ == "__main__":
    main()
