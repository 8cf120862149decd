"""Trains SmolLM2 for one step from Python, and compares the policy in memory with the exported folder.

``python train_smollm2.py FOLDER`` runs in FOLDER and writes ``greedy.json`` there: the token ids of both.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from rlplug_algos.grpo import GRPO
from rlplug_rewards.reasoning_gym import ReasoningGymSource
from rlplug_rewards.text import RegexFormat
from rlplug_rewards.verifiers import ReasoningGymReward
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlplug.data.datamodule import PromptDataModule
from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.interfaces import Placement
from rlplug.models.config import ModelConfig
from rlplug.module import RLModule
from rlplug.recording.run_folder import RunFolder
from rlplug.rollout.hf_engine import HFRollout
from rlplug.training.batch_plan import BatchSizes
from rlplug.types import Request, SamplingParams
from rlplug.weight_sync.buckets import weight_buckets

MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"
EASY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def train(folder: Path) -> RLModule:
    """Take one step on simple sums."""
    module = RLModule(
        policy=ModelConfig(path=str(MODEL), dtype="float32"),
        algorithm=GRPO(),
        rewards=[ReasoningGymReward(), RegexFormat(r"-?\d+", weight=0.2)],
        batch=BatchSizes(prompts_per_step=2, group_size=4, micro_batch_size_per_gpu=4),
        sampling=SamplingParams(max_new_tokens=12),
        optimizer=partial(torch.optim.AdamW, lr=1e-5, weight_decay=0.0),
        num_steps=1,
    )
    prompts = PromptDataModule(
        ReasoningGymSource("chain_sum", size=8, config=EASY, instruction="Answer with the number only."), chat=True
    )
    trainer = Trainer(
        accelerator="cpu",
        strategy=RLFSDP2Strategy(),
        callbacks=[RunFolder(dir=str(folder), report=False)],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        max_epochs=-1,
    )
    trainer.fit(module, prompts)
    return module


def greedy_in_memory(module: RLModule, prompt: list[int]) -> list[int]:
    """Generate with an engine that has the weights of the policy in memory."""
    engine = HFRollout()
    engine.start(module.inputs.spec, Placement(torch.device("cpu"), 0, 1))
    engine.update_weights(weight_buckets(module.models.policy, torch.float32), version=1)
    [completion] = engine.generate([Request("0", tuple(prompt), 0)], SamplingParams(24, temperature=0))
    return completion.token_ids.tolist()


def greedy_exported(policy: Path) -> tuple[list[int], list[int], str]:
    """Return prompt, completion and text of the exported folder, opened with transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy)
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    prompt = inputs["input_ids"][0].tolist()
    completion = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
    return prompt, completion, tokenizer.decode(completion, skip_special_tokens=True)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    trained = train(folder)
    prompt, exported, text = greedy_exported(folder / "001" / "policy")
    result = {"in_memory": greedy_in_memory(trained, prompt), "exported": exported, "text": text}
    (folder / "greedy.json").write_text(json.dumps(result))
