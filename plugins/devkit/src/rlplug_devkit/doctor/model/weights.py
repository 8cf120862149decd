"""Checks of weights: their names and values beside the files, and an export that is opened again."""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlplug.models.export import export_policy
from rlplug.models.hf_files import pretrained
from rlplug.models.transformers_trainer import TRANSFORMERS
from rlplug.weight_sync.buckets import weight_buckets
from rlplug_devkit.doctor.host import gib
from rlplug_devkit.doctor.model.passes import TOLERANCES, eager_logprobs
from rlplug_devkit.doctor.model.results import Verdict
from rlplug_devkit.doctor.model.subject import Subject

NUM_TOKENS: Final = 32
"""Tokens on which an export is compared with the policy."""
BUCKET_BYTES: Final = 1 << 28
SHOWN: Final = 3
"""Names that a message has, of many."""


def names_are_the_files(subject: Subject) -> Verdict:
    """Compare what a weight sync sends, of all layers, with the names and shapes in the safetensors files."""
    sent = {weight.name: weight.shape for each in TRANSFORMERS.hf_weights(subject.whole).values() for weight in each}
    files = subject.files
    advice = (
        "Engines load the files' names: use a model that transformers saves under them, or save it with this version."
    )
    if unknown := sorted(sent.keys() - files.keys()):
        return Verdict(f"a sync sends {_some(unknown)}, which the files lack", "no", advice)
    shapes = _shapes(files, sent.keys())
    if wrong := [name for name, shape in sent.items() if shapes[name] != list(shape)]:
        name = wrong[0]
        return Verdict(f"a sync sends {name} as {list(sent[name])}, and the file has {shapes[name]}", "no", advice)
    tied = getattr(subject.whole.config, "tie_word_embeddings", False)
    left = sorted(files.keys() - sent.keys() - {name for name, _ in subject.whole.named_buffers()})
    left = [name for name in left if not (tied and name.endswith("lm_head.weight"))]
    if left:
        return Verdict(
            f"{len(sent)} names; the files also have {_some(left)}, which do not train",
            "note",
            "An engine that uses them (a second model, a head that drafts) keeps them as they are; exports lack them.",
        )
    return Verdict(f"{len(sent)} names and shapes, each in the files")


def sync_sends_the_files(subject: Subject) -> Verdict:
    """Compare the values that a weight sync sends before training with those in the files."""
    model, dtype = subject.model, subject.config.torch_dtype
    weights, count = TRANSFORMERS.hf_weights(model), 0
    with ExitStack() as stack:
        opened: dict[str, Any] = {}
        for bucket in weight_buckets(model, dtype, BUCKET_BYTES, weights=weights):
            for name, tensor in bucket:
                file = subject.files[name]
                if file not in opened:
                    opened[file] = stack.enter_context(safe_open(file, framework="pt"))
                stored = opened[file].get_tensor(name).to(dtype)
                if not torch.equal(stored, tensor.cpu()):
                    return Verdict(
                        f"a sync sends {name} with other values than the file has",
                        "no",
                        "Loading or the way back converts it wrongly: use another model, and report it.",
                    )
                count += 1
    return Verdict(f"{count} weights, bit for bit as {subject.config.dtype}")


def export_opens_again(subject: Subject) -> Verdict:
    """Export the policy, open it as transformers does, and compare logits and token ids."""
    model, dtype, tokenizer = subject.model, subject.config.torch_dtype, subject.tokenizer
    needed = subject.bytes_of(subject.num_layers[0])
    if (free := shutil.disk_usage(tempfile.gettempdir()).free) < needed:
        found = f"the export takes {gib(needed)}, and {tempfile.gettempdir()} has {gib(free)}"
        return Verdict(found, "skipped", "Set TMPDIR to a larger disk, or give --layers.")
    model.zero_grad()
    with tempfile.TemporaryDirectory(prefix="rlplug-doctor-") as folder:
        export_policy(model, tokenizer, dtype, Path(folder), 0, TRANSFORMERS)
        options = {"dtype": dtype, "attn_implementation": "eager", "output_loading_info": True}
        options["device_map"] = {"": subject.options.device}
        opened, info = pretrained(AutoModelForCausalLM.from_pretrained, folder, **options)
        again: Any = pretrained(AutoTokenizer.from_pretrained, folder)
    if problems := {name: sorted(map(str, problem)) for name, problem in info.items() if problem}:
        found = "; ".join(f"{name}: {_some(problem)}" for name, problem in problems.items())
        return Verdict(f"the export does not fit transformers' model: {found}", "no", "Use another model: report it.")
    text = "What is 12 + 7?\n"
    if again(text)["input_ids"] != tokenizer(text)["input_ids"] or again.chat_template != tokenizer.chat_template:
        return Verdict("the exported tokenizer is another one", "no", "Save the tokenizer anew with save_pretrained.")
    difference = _difference(model, opened, subject)
    found = f"logprobs of the export differ by {difference:.1e}"
    if difference <= TOLERANCES[subject.config.dtype]:
        return Verdict(found)
    return Verdict(found, "no", "The folder's configuration does not make the same network: use another model.")


def _difference(model: Any, opened: Any, subject: Subject) -> float:
    """Return how far logprobs of an export are off, as a share of the largest."""
    device = subject.options.device
    ids = torch.arange(min(NUM_TOKENS, subject.spec.max_context)) * 7919 % subject.vocab_size
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            one, two = (eager_logprobs(each.eval(), ids.to(device)) for each in (model, opened))
    finally:
        model.train().set_attn_implementation(subject.config.attn_implementation)
    return float((one - two).abs().max() / one.abs().max())  # the same computation: equal in bfloat16 too


def _shapes(files: dict[str, str], names: Any) -> dict[str, list[int]]:
    """Return the shapes of weights in their files."""
    in_file: dict[str, list[str]] = defaultdict(list)
    for name in names:
        in_file[files[name]].append(name)
    found: dict[str, list[int]] = {}
    for file, own in in_file.items():
        with safe_open(file, framework="pt") as opened:
            found |= {name: list(opened.get_slice(name).get_shape()) for name in own}
    return found


def _some(names: list[str]) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
