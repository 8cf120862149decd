"""What an engine with merged weights in bfloat16 misses of adapters, by how the sum of both is rounded.

``python benchmarks/lora_rounding.py --model models/SmolLM2-135M-Instruct`` trains adapters on answers to ten sums, in
float32; bfloat16 can hold the frozen weights. After some steps it prints how far the adapters have moved the answers'
logprobs, and how far a model with merged weights is from that: nothing but rounding is between them.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlplug.weight_sync.low_rank import round_to_bfloat16

SUMS: Final = ((4, 8), (17, 25), (68, 32), (9, 6), (31, 44), (5, 77), (62, 19), (8, 8), (53, 26), (12, 81))
ANSWER: Final = 4
"""Tokens at the end of each row whose logprobs are compared."""
ROUNDINGS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "to the nearest": lambda values: values.to(torch.bfloat16),
    "right on average": round_to_bfloat16,
}


def logprobs(model: Any, rows: dict[str, Tensor]) -> Tensor:
    """Return the logprobs of the answers' tokens, float32 [rows, ANSWER], at a temperature of 0.7."""
    logits = model(**rows).logits[:, -ANSWER - 1 : -1] / 0.7
    return logits.log_softmax(-1).gather(-1, rows["input_ids"][:, -ANSWER:, None])[..., 0]


def merge(adapted: Any, into: nn.Module, rounding: Callable[[Tensor], Tensor]) -> float:
    """Write merged weights into a copy of the model; return the share of adapted weights that did not change."""
    kept = total = 0
    for name, layer in adapted.base_model.model.named_modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer"):
            weight, update = layer.base_layer.weight, layer.get_delta_weight("default")
            merged = rounding(weight + update).float()
            into.get_submodule(name).weight.copy_(merged)  # type: ignore[operator]
            kept, total = kept + int((merged == weight).sum()), total + weight.numel()
    return kept / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--after", type=int, nargs="+", default=[1, 3, 6, 12, 24], help="steps")
    parser.add_argument("--lr", type=float, default=2e-4)
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).float()
    questions = [[{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}] for a, b in SUMS]
    prompts = [tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=False) for each in questions]
    texts = [f"{prompt}{a + b}<|im_end|>" for prompt, (a, b) in zip(prompts, SUMS, strict=True)]
    rows = dict(tokenizer(texts, return_tensors="pt", padding=True))
    copied = copy.deepcopy(model)
    adapted = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=options.lr)
    with torch.no_grad():
        before = logprobs(adapted, rows)
    print("| steps | moved by | " + " | ".join(f"rounded {name}" for name in ROUNDINGS) + " | unchanged weights |")
    print("|-" * (len(ROUNDINGS) + 3) + "|")
    for step in range(1, max(options.after) + 1):
        (-logprobs(adapted, rows).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in options.after:
            with torch.no_grad():
                now = logprobs(adapted, rows)
                kept, missed = {}, {}
                for name, rounding in ROUNDINGS.items():
                    kept[name] = merge(adapted, copied, rounding)
                    missed[name] = (logprobs(copied, rows) - now).abs().mean().item()
            cells = [f"{(now - before).abs().mean():.3f}", *(f"{value:.4f}" for value in missed.values())]
            print(
                f"| {step} | {' | '.join(cells)} | {' / '.join(f'{share:.0%}' for share in kept.values())} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
