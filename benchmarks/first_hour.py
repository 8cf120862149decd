r"""Walks through the first hour: a user's tasks by the commands of the pages, and TRL's quick start beside ours.

    python benchmarks/first_hour.py --model models/SmolLM2-135M-Instruct --out OUT

Printed for each task: the page that has its command, the keys and options that a user writes, the CPU seconds until the
first word appears and until the end, and the words that show that it worked. ``--model`` is a small model of a folder,
with which both sides take three steps of eight completions: ``make models/SmolLM2-135M-Instruct/config.json`` fetches
one. Needs rlplug, rlplug-algos, -watch, -plan, -eval and -devkit, and trl. It runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
RLPLUG = f"{sys.executable} -m rlplug"

FILES = {
    "train.jsonl": "".join(
        json.dumps({"prompt": f"What is {n} + {n}?", "answer": str(2 * n)}) + "\n" for n in range(64)
    ),
    "my_parts.py": """import torch
from rlplug.plugin_manager import hookimpl
from rlplug_algos import policy_loss


def digits(completion, answer):
    return sum(each.isdigit() for each in completion) / (1 + len(completion))


@policy_loss
def reinforce(logprobs, batch):
    return -batch.advantages * logprobs


@hookimpl
def rlplug_after_update(step, metrics):
    print("after update", step)
""",
    "run.yaml": """policy: {model}
train: train.jsonl
rewards: my_parts.digits
chat: true
num_steps: 3
max_new_tokens: 16
""",
    "run.py": """from my_parts import digits
from rlplug import BatchSizes, FileSource, FunctionReward, ModelConfig, PromptDataModule, RLModule, SamplingParams, fit
from rlplug_algos import GRPO

module = RLModule(
    policy=ModelConfig("{model}", dtype="float32"),
    algorithm=GRPO(),
    rewards=[FunctionReward(digits)],
    sampling=SamplingParams(max_new_tokens=16),
    batch=BatchSizes(prompts_per_step=2, group_size=4),
    num_steps=3,
)
print(fit(module, PromptDataModule(FileSource("train.jsonl"), chat=True), accelerator="cpu"))
""",
    "trl_run.py": """from datasets import load_dataset
from my_parts import digits
from trl import GRPOConfig, GRPOTrainer


def reward(completions, answer, **kwargs):
    return [digits(completion[0]["content"], each) for completion, each in zip(completions, answer)]


dataset = load_dataset("json", data_files="train.jsonl", split="train")
dataset = dataset.map(lambda row: {{"prompt": [{{"role": "user", "content": row["prompt"]}}]}})
trainer = GRPOTrainer(
    model="{model}",
    reward_funcs=reward,
    train_dataset=dataset,
    args=GRPOConfig(
        output_dir="trl", max_steps=3, per_device_train_batch_size=8, num_generations=4, max_completion_length=16,
        use_cpu=True, bf16=False, logging_steps=1, report_to="none",
    ),
)
trainer.train()
trainer.save_model("trl")
""",
}
"""Files that the user of the tasks writes."""
SMALL = (
    "--model.batch.prompts_per_step 2 --model.batch.group_size 4 --model.policy.dtype float32 --trainer.accelerator cpu"
)

LOSS = "--algorithm Composed --model.algorithm.policy_loss my_parts.reinforce"


@dataclass(frozen=True)
class Task:
    """What a user does, and how it shows that it was done."""

    what: str
    page: str
    command: str
    sign: str
    """A pattern of the output."""
    status: int = 0


TASKS = [
    Task("train the quickstart", "README", f"{RLPLUG} fit -c {QUICKSTART} --num_steps 3", "training reward"),
    Task("train own data, by a file of keys", "README", f"{RLPLUG} fit -c run.yaml {SMALL}", "training reward"),
    Task(
        "the same in one line",
        "README",
        f"{RLPLUG} fit --policy {{model}} --train train.jsonl --reward my_parts.digits --num_steps 1 {SMALL}",
        "training reward",
    ),
    Task("the same from Python", "README", f"{sys.executable} run.py", "FitResult"),
    Task(
        "own hook in a local file",
        "README",
        f"{RLPLUG} fit -c run.yaml -p my_parts --num_steps 1 {SMALL}",
        "after update 1",
    ),
    Task(
        "own loss in a local file",
        "docs/writing-an-algorithm.md",
        f"{RLPLUG} fit -c run.yaml {LOSS} --num_steps 1 {SMALL}",
        "training reward",
    ),
    Task("a misspelt key", "", f"{RLPLUG} fit -c run.yaml --model.batch.group_siz 4", "Did you mean", status=2),
    Task("go on with a run", "docs/first-run.md", f"{RLPLUG} fit --resume {{run}} --num_steps 4", "training reward"),
    Task("evaluate what was trained", "docs/evaluating.md", f"{RLPLUG} eval {{run}} --data train -n 2", "tables:"),
    Task("look at a run", "docs/run-folder.md", f"{RLPLUG} report {{run}}", "report.html"),
    Task("make a plugin of one's own", "docs/writing-a-plugin.md", f"{RLPLUG} new-plugin mine --kind reward", "mine"),
    Task("does it fit a GPU", "docs/memory.md", f"{RLPLUG} plan -c run.yaml --gpu-gib 80", "update"),
    Task("all options on a screen", "", f"{RLPLUG} fit --help", "--resume"),
    Task("TRL's quick start, same model and sizes", "TRL", f"{sys.executable} trl_run.py", "train_runtime"),
]


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system + times.children_user + times.children_system


def carry_out(command: str, folder: Path) -> tuple[int, float, float, str]:
    """Return the exit status, CPU seconds to the first word and to the end, and the output."""
    began = psutil.Process().cpu_times()
    process = subprocess.Popen(command.split(), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    first = process.stdout.read(1)
    to_first = cpu_seconds(psutil.Process(process.pid)) if process.poll() is None else 0.0
    output = (first + process.stdout.read()).decode(errors="replace")
    status, ended = process.wait(), psutil.Process().cpu_times()
    whole = ended.children_user + ended.children_system - began.children_user - began.children_system
    return status, to_first or whole, whole, output


def num_keys(command: str, folder: Path) -> int:
    """Return the keys and options that a user writes, in the command and in the file that it names."""
    keys = re.findall(r"(?<= )--?[a-z][\w.-]*", command)
    file = next((part for part in command.split() if part in FILES), "")
    text = (folder / file).read_text() if file else ""
    return len(keys) + len(re.findall(r"^\w+:" if file.endswith(".yaml") else r"\b\w+=(?!=)", text, re.MULTILINE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a small model")
    parser.add_argument("--out", type=Path, required=True, help="new folder for files, runs and logs")
    options = parser.parse_args()
    model, folder = options.model.resolve(), options.out.resolve()
    folder.mkdir(parents=True)
    (folder / "examples").symlink_to(ROOT / "examples")
    for name, text in FILES.items():
        (folder / name).write_text(text.format(model=model) if "{model}" in text else text)
    print("| task | page | keys and options | CPU s to the first word | to the end | |")
    print("|---|---|---:|---:|---:|---|")
    for task in TASKS:
        command = task.command.format(model=model, run=folder / "runs" / "default" / "001")
        status, to_first, whole, output = carry_out(command, folder)
        (folder / f"{TASKS.index(task):02}.log").write_text(f"{command}\n{output}")
        is_done = status == task.status and re.search(task.sign, output)
        written = num_keys(command.replace(SMALL, ""), folder)
        shown = "done" if is_done else f"exit status {status}: {' '.join(output.split())[-160:]}"
        print(f"| {task.what} | {task.page} | {written} | {to_first:.1f} | {whole:.1f} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
