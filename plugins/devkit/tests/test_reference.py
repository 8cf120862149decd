"""What engines are compared with: it is right itself, and it shows a single tensor that did not arrive."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import numpy
import pytest
import torch
from rlplug_devkit.models import BOS, ENDS, PAD, VOCABULARY, make_model_folder
from rlplug_devkit.reference import (
    BFLOAT16,
    FLOAT32,
    ReferencePolicy,
    chi_square,
    compare,
    greedy_gap,
    sampled_distribution,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlplug
from rlplug.models.config import ModelConfig, load_spec, load_tokenizer
from rlplug.ops import scaled_logits, truncate_logits
from rlplug.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.kit

FAMILIES = ["llama", "qwen2"]
PROMPTS = [(8, 9), tuple(range(10, 40))]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders = {family: tmp_path_factory.mktemp("models") / family for family in FAMILIES}
    for family, folder in folders.items():
        make_model_folder(family, folder)
    return folders


def greedy_completions(policy):
    """Return requests, and what ``policy`` says to them, as an engine would."""
    requests, completions = [], []
    for index, prompt in enumerate(PROMPTS):
        tokens, logprobs = [], []
        for _ in range(8):
            row = torch.from_numpy(policy.logits((*prompt, *tokens))[-1])
            tokens.append(int(row.argmax()))
            logprobs.append(float(row.log_softmax(-1).max()))
        requests.append(Request(str(index), prompt, seed=0))
        completions.append(Completion(str(index), tuple(tokens), tuple(logprobs), "length", 1))
    return requests, completions


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_is_a_model_with_two_end_tokens_and_a_tokenizer_that_adds_bos(family, folder_of):
    config = ModelConfig(path=str(folder_of[family]))
    spec = load_spec(config, load_tokenizer(config))
    assert (spec.eos_token_ids, spec.pad_token_id) == (ENDS, PAD)
    assert AutoTokenizer.from_pretrained(folder_of["llama"])("AB").input_ids == [BOS, 3, 4]
    model = AutoModelForCausalLM.from_pretrained(folder_of[family])
    assert model.config.tie_word_embeddings == (family == "qwen2")
    assert model.generation_config.top_k == 3  # what a rollout must not heed


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=0.7, top_k=5), SamplingParams(top_p=0.6, top_k=9, temperature=1.5)],
    ids=str,
)
def test_distribution_is_that_of_the_trainer(sampling):
    logits = torch.randn(20, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    trainer = truncate_logits(scaled_logits(logits, sampling.temperature), sampling).softmax(dim=-1)
    numpy.testing.assert_allclose(sampled_distribution(logits.numpy(), sampling), trainer.numpy(), atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("end_probability", [0.2, 1e-30])
def test_unigram_says_the_same_after_every_token(family, dtype, end_probability, folder_of):
    policy = ReferencePolicy(str(folder_of[family]), dtype).unigram(ENDS, end_probability)
    probabilities = sampled_distribution(policy.logits((5,), (ENDS[0], 9, PAD, 30)), SamplingParams())
    numpy.testing.assert_allclose(probabilities, probabilities[:1].repeat(5, axis=0), rtol=1e-4, atol=1e-20)
    ends = probabilities[0, list(ENDS)]
    assert ends[0] == pytest.approx(ends[1])
    assert ends.sum() == pytest.approx(end_probability, rel=0.4 if dtype == torch.bfloat16 else 1e-3, abs=1e-20)
    numpy.testing.assert_allclose(numpy.delete(probabilities[0], list(ENDS)), (1 - ends.sum()) / 62, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_stale_tensor_shows_even_within_the_tolerances_of_bfloat16(family, folder_of):
    first = ReferencePolicy(str(folder_of[family]), torch.bfloat16)
    changed, stale = first.changed(1.0), first.changed(1.0)
    requests, completions = greedy_completions(changed)
    assert compare(changed, requests, completions, SamplingParams(temperature=0)).within(FLOAT32)
    assert greedy_gap(changed, requests, completions) == 0
    old = dict(first.model.named_parameters())
    with torch.no_grad():
        for name, parameter in stale.model.named_parameters():
            right = parameter.clone()
            parameter.copy_(old[name])
            requests, completions = greedy_completions(stale)
            parameter.copy_(right)
            difference = compare(changed, requests, completions, SamplingParams(temperature=0))
            gap = greedy_gap(changed, requests, completions)
            assert not difference.within(BFLOAT16) or gap > BFLOAT16.max, name


def test_buckets_hold_every_tensor_until_the_next_is_asked_for(folder_of):
    policy = ReferencePolicy(str(folder_of["qwen2"]), torch.bfloat16)
    expected, former, num_bytes = dict(policy.model.named_parameters()), [], 0
    for bucket in policy.buckets(torch.device("cpu"), max_bytes=10_000):
        assert all(bool(tensor.isnan().all()) for _, tensor in former)
        for name, tensor in bucket:
            assert torch.equal(tensor.float(), expected.pop(name)), name
            num_bytes += tensor.nbytes
        former = bucket
    assert all(bool(tensor.isnan().all()) for _, tensor in former)
    assert expected == {}
    assert num_bytes == policy.num_bytes()
    assert not any(bool(parameter.isnan().any()) for parameter in policy.model.parameters())


def test_differences_are_counted(folder_of):
    policy = ReferencePolicy(str(folder_of["llama"]), torch.float32)
    requests, completions = greedy_completions(policy)
    logprobs = (completions[0].logprobs[0] + 0.5, *completions[0].logprobs[1:])
    wrong = [Completion("0", completions[0].token_ids, logprobs, "length", 1), completions[1]]
    difference = compare(policy, requests, wrong, SamplingParams(temperature=0))
    assert difference.num_tokens == 16
    assert difference.max == pytest.approx(0.5, abs=1e-4)
    assert difference.mean == pytest.approx(0.5 / 16, abs=1e-4)
    worst = int(policy.logits(PROMPTS[0])[0].argmin())
    unlikely = [Completion("0", (worst, *completions[0].token_ids[1:]), logprobs, "length", 1), completions[1]]
    assert compare(policy, requests, unlikely, SamplingParams(top_k=63)).outside == 1 / 16
    assert greedy_gap(policy, requests, unlikely) > 3
    nan = [Completion("0", completions[0].token_ids, (math.nan,) * 8, "length", 1), completions[1]]
    assert not compare(policy, requests, nan, SamplingParams(temperature=0)).within(BFLOAT16)


def test_chi_square_tells_distributions_apart():
    random = numpy.random.default_rng(0)
    right = random.dirichlet(numpy.ones(VOCABULARY))
    tempered = right**0.5 / (right**0.5).sum()
    for _ in range(200):
        statistic, bound = chi_square(random.multinomial(2000, right).astype(float), right)
        assert statistic < bound
        statistic, bound = chi_square(random.multinomial(2000, tempered).astype(float), right)
        assert statistic > bound


def test_nothing_else_of_the_core_needs_pytest_or_the_kit():
    core = Path(rlplug.__file__).parent
    for file in core.rglob("*.py"):
        if file.is_relative_to(core / "testing"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith(("pytest", "_pytest", "rlplug_devkit"))], file
