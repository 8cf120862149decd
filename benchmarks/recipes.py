"""Runs recipes of ``configs/recipes`` with a local policy and local prompts in place of the hub's, or plans them.

    python benchmarks/recipes.py grpo_qwen3_0.6b ppo_qwen3_1.7b --policy models/SmolLM2-135M-Instruct --out OUT
    python benchmarks/recipes.py dapo_qwen3_8b_fp8 --policy models/SmolLM2-135M-Instruct --devices 1 --out OUT
    python benchmarks/recipes.py grpo_qwen3_0.6b --policy models/SmolLM2-135M-Instruct --accelerator cpu --out OUT
    python benchmarks/recipes.py --plan --gpu-gib 80 --out OUT

A run prints planned and measured GiB for each phase of the memory plan, and seconds of a step (median, without the
first). ``--plan`` needs neither GPU nor weights: it prints what each recipe needs with its own model's shape, and with
prompts as long as it allows. Without names, all recipes. On a CPU, ``HFRollout`` generates, and recipes whose engine
has GPUs of its own are refused.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import yaml
from shapes import write_config
from transformers import AutoTokenizer

from rlplug.interfaces.memory import PLAN_PHASES
from rlplug.observability.metrics_log import read_metrics

ROOT: Final = Path(__file__).parents[1]
RECIPES: Final = ROOT / "configs" / "recipes"
TOKENIZER: Final = ROOT / "examples" / "quickstart" / "model"
SUMS: Final = ROOT / "examples" / "calculator" / "train.jsonl"
TOOLS: Final = 64
"""Tokens of a prompt that are left to the tools of an environment."""
TEMPLATE: Final = (
    "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ message['content'] }}>{% endfor %}"
)
"""A chat template that has the variables of Qwen3's."""


def names() -> list[str]:
    """Return the names of all recipes."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def read(name: str) -> dict[str, Any]:
    """Return the keys of a recipe."""
    config: dict[str, Any] = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    return config


def source(path: Path, **keys: str) -> dict[str, Any]:
    """Return a source of prompts in a file; of ``keys``, those that are not given stay the recipe's."""
    return {"class_path": "FileSource", "init_args": {"path": str(path)} | keys}


def planned_with(name: str, folder: Path) -> list[str]:
    """Return the arguments that plan a recipe where its model and data are not.

    Args:
        name: Of the recipe.
        folder: Where the model's configuration is written, prompts as long as the recipe allows, and the overlay.
    """
    config = read(name)
    shape = config["model"]["policy"]["path"].rpartition("/")[2].lower()
    if not (policy := folder / shape).is_dir():
        write_config(shape, folder)
        for file in TOKENIZER.glob("token*.json"):
            shutil.copy(file, policy)
        (policy / "chat_template.jinja").write_text(TEMPLATE)
    messages = [{"role": "system", "content": config["data"]["system_prompt"]}, {"role": "user", "content": ""}]
    rendered = AutoTokenizer.from_pretrained(policy).apply_chat_template(messages, tokenize=False)
    taken = len(AutoTokenizer.from_pretrained(policy)(rendered).input_ids)
    taken += TOOLS if "environment" in config["model"] else 0
    sources = {}
    for split in ("train", "val"):
        keys = config["data"][split]["init_args"]
        prompt = str(int(split == "val")) * (config["data"]["max_prompt_tokens"] - taken)
        row = {keys.get("prompt_key", "prompt"): prompt, keys.get("answer_key", "answer"): "1"}
        file = folder / f"{name}.{split}.jsonl"
        file.write_text(json.dumps(row) + "\n")
        sources[split] = source(file)
    return laid_over(name, {"model": {"policy": {"path": str(policy)}}, "data": sources}, folder)


def run_with(name: str, folder: Path, options: argparse.Namespace) -> list[str]:
    """Return the arguments that run a recipe for a few steps, with a local policy and local prompts.

    Raises:
        SystemExit: Its engine has GPUs of its own, and there are none.
    """
    model = read(name)["model"]
    template = options.policy / "chat_template.jinja"
    has_thinking = template.is_file() and "enable_thinking" in template.read_text()
    kwargs = model["policy"]["chat_template_kwargs"] if has_thinking else {}
    policy = {"path": str(options.policy), "init": options.init, "chat_template_kwargs": kwargs}
    changed: dict[str, Any] = {
        "policy": policy,
        "num_steps": options.steps,
        "validation": {"at_start": False, "every_n_steps": None},
        "limits": {"max_reward_error_share": 1.0},
    }
    if options.prompts is not None:
        group, mini = model["batch"]["group_size"], model["batch"].get("mini_batch_size")
        completions = options.prompts * group
        changed["batch"] = {"prompts_per_step": options.prompts}
        changed["batch"] |= {} if mini is None else {"mini_batch_size": max(1, completions // 2)}
    if options.tokens is not None:
        changed["sampling"] = {"max_new_tokens": options.tokens}
        if "overlong_buffer" in str(model["algorithm"]):
            changed["algorithm"] = {"init_args": {"overlong_buffer": options.tokens // 4}}
    if "critic" in model:  # half of the steps train the policy too
        changed["critic"] = {"warmup_steps": min(model["critic"]["warmup_steps"], options.steps // 2)}
    trainer: dict[str, Any] = {} if options.devices is None else {"devices": options.devices}
    if options.accelerator == "cpu":
        if "partial_rollout" in model:
            raise SystemExit(f"{name}: its engine needs a GPU of its own.")
        trainer |= {"accelerator": "cpu", "devices": 1}
        policy["dtype"] = "float32"
        changed |= {"rollout": {"class_path": "HFRollout"}, "optimizations": []}
    overlay = {
        "trainer": trainer,
        "model": changed,
        "data": {"train": source(options.data, prompt_key="prompt", answer_key="answer"), "val": None},
        "run": {"dir": str(folder / name), "report": False, "export_policy": False},
        "checkpoint": {"every_n_steps": options.steps},
    }
    return laid_over(name, overlay, folder)


def laid_over(name: str, overlay: dict[str, Any], folder: Path) -> list[str]:
    """Return the arguments that name a recipe and, after it, a file with ``overlay``."""
    file = folder / f"{name}.overlay.yaml"
    file.write_text(yaml.safe_dump(overlay))
    return ["--config", str(RECIPES / f"{name}.yaml"), "--config", str(file)]


def said_needs(name: str) -> dict[str, float]:
    """Return the GiB that each phase needs, of the comment at the top of a recipe."""
    (line,) = [line for line in (RECIPES / f"{name}.yaml").read_text().splitlines() if line.startswith("# Planned")]
    words = [phase.split() for phase in line.rpartition(":")[2].rstrip(".").split(",")]
    return {phase: float(gib) for phase, gib in words}


def needs(rows: list[list[str]]) -> dict[str, float]:
    """Return the GiB that each phase needs, of the rows of a memory plan."""
    found = next((row for row in rows if row[0] == "needed"), None)
    return {} if found is None else {phase: float(gib) for phase, gib in zip(PLAN_PHASES, found[1:], strict=True)}


def printed_needs(output: str) -> dict[str, float]:
    """Return the GiB that each phase needs, of what ``rlplug plan`` printed."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    return needs([row for row in rows if len(row) == 1 + len(PLAN_PHASES)])


def measured(run_dir: Path) -> dict[str, Any]:
    """Return planned and measured GiB by phase, and the seconds of a step, of a run that has ended."""
    planned = needs(json.loads((run_dir / "run.json").read_text())["memory_plan"])
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "time/rollout" in row]
    peaks = {
        phase: max((row[f"memory/{phase}"] for row in rows if f"memory/{phase}" in row), default=None)
        for phase in PLAN_PHASES
    }
    seconds = [row["time/step"] for row in rows[1:]] or [row["time/step"] for row in rows]
    return {
        "planned GiB": planned,
        "measured GiB": {phase: round(gib, 2) for phase, gib in peaks.items() if gib is not None},
        "seconds per step": round(statistics.median(seconds), 3),
    }


def command(arguments: list[str], log: Path) -> tuple[int, str]:
    """Run one command line of rlplug from the repository's root; return its exit status and what it printed."""
    with log.open("w") as output:
        line = [sys.executable, "-m", "rlplug", *arguments]
        code = subprocess.run(line, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    return code, log.read_text()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("names", nargs="*", metavar="RECIPE", help=f"of {', '.join(names())}; by default all")
    add("--policy", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct", help="folder of the model to train")
    add("--init", choices=("pretrained", "random"), default="pretrained")
    add("--data", type=Path, default=SUMS, help="prompts with answers, as JSON lines")
    add("--steps", type=int, default=5)
    add("--prompts", type=int, help="prompts a step, instead of the recipe's; its mini-batches become halves of a step")
    add("--tokens", type=int, help="longest completion, instead of the recipe's")
    add("--devices", type=int, help="GPUs, instead of the recipe's")
    add("--accelerator", choices=("gpu", "cpu"), default="gpu")
    add("--plan", action="store_true", help="only plan, with each recipe's own model")
    add("--gpu-gib", type=float, default=80.0, help="memory of a GPU that is planned for")
    add("--out", type=Path, required=True, help="folder for run folders and logs")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(names()):
        parser.error(f"there is no recipe {', '.join(sorted(unknown))}: there are {', '.join(names())}")
    options.names = options.names or names()
    options.policy, options.data, options.out = (p.resolve() for p in (options.policy, options.data, options.out))
    return options


def main() -> int:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in options.names:
        log = options.out / f"{name}.log"
        if options.plan:
            line = ["plan", "--gpu-gib", str(options.gpu_gib), *planned_with(name, options.out)]
        else:
            line = ["fit", *run_with(name, options.out, options)]
        code, output = command(line, log)
        failed |= code
        if code:
            result: dict[str, Any] = {"exit status": code, "said": output[-1500:]}
        else:
            newest = max((options.out / name).iterdir()) if not options.plan else None
            result = {"planned GiB": printed_needs(output)} if newest is None else measured(newest)
        print(json.dumps({"recipe": name} | result), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
