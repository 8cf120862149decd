"""``rlplug plan``: what it prints, its exit status, and that it leaves nothing behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from command_line import SMALL, Job, Runs

from rlplug.training.batch_plan import SMALLEST_DEFAULT_BUDGET
from rlplug.weight_sync.manifest import meta_model

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
PLAN = ["plan", *SMALL[1:]]
VLLM = [*PLAN, "--config", "configs/rollout/vllm.yaml", "--model.policy.dtype", "bfloat16"]
SMALL_GPU = [*VLLM, "--gpu-gib", "8", "--model.rollout.gpu_memory_utilization", "0.9"]
NARROW = [*SMALL[1:], "--model.batch.prompts_per_step", "16", "--model.batch.group_size", "64"]
SHORT = ["--prompt-tokens", "16", "--max_new_tokens", "8", "--gpu-gib", "24"]
REWARD = ["--reward", "examples.quickstart.reward.digits_in_place"]
FP8 = ["--config", "configs/weight_sync/fp8_block.yaml"]


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plan-runs")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plan-written") / "plan.yaml"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, runs_dir: Path, written: Path) -> Runs:
    written_run, narrow = written.with_name("run.yaml"), str(written.with_name("narrow.yaml"))
    arguments = {
        "fits": [*PLAN, "--gpu-gib", "80"],
        "vllm": [*VLLM, "--gpu-gib", "80"],
        "four": [*PLAN, "--gpu-gib", "80", "--trainer.devices", "4", "--network-gbit-s", "0.008"],
        "tiny": [*PLAN, "--gpu-gib", "0.6"],
        "small": SMALL_GPU,
        "write": [*SMALL_GPU, "--write", str(written)],
        "laid over": [*SMALL_GPU, "--config", str(written), "--write", str(written)[:-5] + "2.yaml"],
        "twice": [*SMALL_GPU, "--write", str(written)],
        "narrow": ["plan", *NARROW, "--gpu-gib", "0.76", "--write", narrow],
        "trained": ["fit", *NARROW, "--config", narrow, "--model.num_steps", "1"],
        "fp8": [*VLLM, "--gpu-gib", "80", *FP8],
        "fp8 of two": [*VLLM, "--gpu-gib", "80", *FP8, "--model.rollout.tensor_parallel_size", "2"],
        "optional": [
            *PLAN,
            *("--gpu-gib", "80", "--model.optimizations"),
            "[{class_path: GradientCheckpointing, init_args: {only_if_needed: true}}]",
        ],
        "no size": PLAN,
        "no number": [*PLAN, "--gpu-gib", "much"],
        "help": ["plan", "--help"],
        "blocked": ["plan", "--model-size", "8B", "--gpu-gib", "80", "--block", "optims"],
        "size": ["plan", "--model-size", "1.7B", "--gpu-gib", "80", "--write", str(written.with_name("size.yaml"))],
        "recipe": ["plan", "--config", "configs/recipes/grpo_qwen3_8b.yaml", "--model-size", "8B", "--gpu-gib", "141"],
        "shape": ["plan", "--model", "tests/model/config.json", *SHORT, *REWARD, "--write", str(written_run)],
        "written run": [
            "plan",
            "--config",
            str(written_run),
            *SHORT[-2:],
            "--train",
            "examples/quickstart/train.jsonl",
        ],
        "two shapes": ["plan", "--model", "tests/model", "--model-size", "7B"],
        "no shape": ["plan", "--model", "tests/nowhere"],
        "no planner": ["--block", "plan", *PLAN, "--gpu-gib", "80"],
        "key": [*PLAN, "--gpu-gib", "80", "--model.num_stepz", "3"],
    }
    after = {"laid over": "write", "twice": "write", "written run": "shape", "trained": "narrow"}
    folders = {"trained": written.parent / "trained"}
    jobs = {
        name: Job([*words, "--run.dir", str(folders.get(name, runs_dir / "runs"))], after=after.get(name))
        for name, words in arguments.items()
    }
    return Runs(jobs, tmp_path_factory.mktemp("plan"))


@pytest.mark.parametrize("name", ["fits", "vllm", "four", "fp8", "optional"])
def test_a_run_that_fits_is_shown(results: Runs, name: str) -> None:
    assert results[name].exit_code == 0, results[name].output
    for part in ("batch plan", "memory plan", "head-room", "recommended: model.batch.max_tokens_per_gpu"):
        assert part in results[name].message


def test_a_run_without_a_planner_says_so(results: Runs) -> None:
    """Without rlplug-plan a run on GPUs goes on; the command, which is all plan, does not."""
    assert results["no planner"].exit_code == 2
    assert "Nothing plans the run's memory" in results["no planner"].message
    assert "Planning comes with rlplug-plan" in results["no planner"].message
    assert "the plugin plan is blocked" in results["no planner"].message


def test_sizes_are_those_of_the_devices(results: Runs) -> None:
    assert "data-parallel ranks │ 4" in results["four"].message
    assert "data-parallel ranks │ 1" in results["fits"].message


def test_seconds_of_a_sync_follow_from_its_bytes(results: Runs) -> None:
    """The tiny model on one host, at a million bytes a second: as many seconds as it has megabytes."""
    found = re.search(r"weight sync: .* GiB, about (\S+) s .* \(gather 0 s, broadcast", results["four"].message)
    assert found is not None
    num_bytes = sum(p.numel() * p.element_size() for p in meta_model("tests/model").float().parameters())
    assert float(found[1]) == pytest.approx(num_bytes / 1e6, rel=0.05)


def test_vllm_is_planned_without_a_gpu_and_without_vllm(results: Runs) -> None:
    message = results["vllm"].message
    assert "engine stays awake" in message
    assert "recommended: model.rollout.init_args.gpu_memory_utilization" in message
    assert "model.memory.offload: none is enough" in message


def test_a_run_that_does_not_fit_exits_with_1_and_a_remedy(results: Runs) -> None:
    assert results["small"].exit_code == 1
    message = results["small"].message
    assert "its phase rollout needs" in message
    assert "Smallest change that makes it fit: model.rollout.init_args.gpu_memory_utilization: 0.8" in message


def test_what_was_written_fits_when_it_is_laid_over_the_run(results: Runs, written: Path) -> None:
    """Catches a file that the command line refuses, and one whose values do not fit together."""
    assert results["write"].exit_code == 1
    assert "gpu_memory_utilization: 0." in written.read_text()
    assert results["laid over"].exit_code == 0, results["laid over"].output


def test_what_was_written_trains_when_it_is_laid_over_the_run(results: Runs, written: Path) -> None:
    """Catches a file that ``plan`` reads and ``fit`` does not, and values that the run's own replace."""
    assert results["narrow"].exit_code == 1
    planned = yaml.safe_load(written.with_name("narrow.yaml").read_text())["model"]["batch"]
    assert planned["max_tokens_per_gpu"] < SMALLEST_DEFAULT_BUDGET
    assert results.ended("trained")
    trained = yaml.safe_load((written.parent / "trained/001/config.yaml").read_text())["model"]["batch"]
    assert {name: trained[name] for name in planned} == planned


def test_a_file_is_not_overwritten(results: Runs) -> None:
    assert results["twice"].exit_code == 2
    assert "is not overwritten" in results["twice"].message


def test_a_size_is_planned_without_a_model_or_data(results: Runs, written: Path) -> None:
    """Catches a plan that reads weights, a tokenizer or prompts, and an assumed number that is not said."""
    assert results["size"].exit_code in (0, 1), results["size"].output
    message = results["size"].message
    assert "model: 1.7B: the shape of Qwen/Qwen3-1.7B, 1.72B parameters" in message
    assert "assumed: prompts of 1,024 tokens (--prompt-tokens); trainer.devices 8; model.rollout VLLMRollout" in message
    assert "memory plan" in message
    found = re.search(
        r"recommended: model\.rollout\.init_args\.max_num_seqs: (\d+); \1 of the 128 completions", message
    )
    assert found is not None
    assert 64 <= int(found[1]) <= 128
    assert "path: Qwen/Qwen3-1.7B" in written.with_name("size.yaml").read_text()


def test_a_size_takes_the_place_of_a_files_model_and_data(results: Runs) -> None:
    """Alone catches options of the file's template, data and validation that the stand-ins are refused for."""
    assert results["recipe"].exit_code == 0, results["recipe"].output
    for words in ("memory plan", "shared prefixes: of a group of 8 with ", "the prompt once a pass:"):
        assert words in results["recipe"].message


def test_the_run_that_a_shape_gives_can_be_planned_with_its_data(results: Runs, written: Path) -> None:
    """Catches a file that the parser refuses, and stand-ins or a folder that is gone in it."""
    assert results["shape"].exit_code == 0, results["shape"].output
    assert "model.rewards" not in results["shape"].message
    text = written.with_name("run.yaml").read_text()
    assert "# Yours to give: train.jsonl, a prompt (and an answer) a line.\n" in text
    assert "path: tests/model\n" in text
    assert results["written run"].exit_code == 0, results["written run"].output
    assert "recommended: model.rollout.init_args.max_num_seqs" not in results["written run"].message


def test_a_run_that_nothing_makes_fit_says_so(results: Runs) -> None:
    assert results["tiny"].exit_code == 1
    assert "No option makes it fit" in results["tiny"].message


def test_a_plan_without_rlplug_optims_names_nothing_of_it(results: Runs) -> None:
    """Catches a plan that imports the plugin, and a change that the run would refuse: with it, an offload is told."""
    assert results["blocked"].exit_code == 1
    message = results["blocked"].message
    assert "Smallest change that makes it fit" in message
    assert not re.search("FusedLogprobs|Checkpointing|ActivationOffload|offload: optimizer", message)


def test_what_is_not_needed_is_left_out(results: Runs) -> None:
    assert "GradientCheckpointing left out: the plan fits without it" in results["optional"].message


@pytest.mark.parametrize(
    ("name", "part"),
    [
        pytest.param("no size", "there is no GPU here: say how much memory each GPU has", marks=WITHOUT_GPU),
        ("no number", "--gpu-gib is 'much'"),
        ("two shapes", "not allowed with argument"),
        ("no shape", "--model tests/nowhere: tests/nowhere cannot be read"),
        ("key", "Did you mean 'model.num_steps'?"),
        ("fp8 of two", "VLLMRollout cannot take model.layers.0.self_attn.q_proj.weight [128, 128] in FP8"),
    ],
)
def test_a_mistake_is_a_message(results: Runs, name: str, part: str) -> None:
    assert results[name].exit_code == 2
    assert part in results[name].message
    assert "Traceback" not in results[name].output


def test_help_needs_no_gpu_and_names_its_option(results: Runs) -> None:
    assert results["help"].exit_code == 0, results["help"].output
    assert "--gpu-gib GIB" in results["help"].message


def test_no_run_folder_is_made(results: Runs, runs_dir: Path) -> None:
    assert results["fits"].exit_code == 0
    assert not list(runs_dir.iterdir())
