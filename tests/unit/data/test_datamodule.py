"""The data module: what it refuses or leaves out, its stream of prompts, and its life under Lightning."""

import logging
import warnings

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import PreTrainedTokenizerFast
from unit.data.prompt_cases import ListSource, build_tokenizer, set_up, setup_error, train_prompts

from rlplug.data.datamodule import PromptDataModule
from rlplug.data.prompt_encoder import PromptRules
from rlplug.data.sources import AllRows, FileSource
from rlplug.errors import ConfigError
from rlplug.rewards import FunctionReward


class Policy(LightningModule):
    """Draws two prompts a step, as the RL loop does."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, max_context: int = 100, max_new_tokens: int = 20) -> None:
        super().__init__()
        self.prompt_rules = PromptRules(tokenizer, (), max_context, max_new_tokens)
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.drawn: list[str] = []
        self.num_validation_steps = 0

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.drawn += [prompt.uid for prompt in self.trainer.datamodule.train_stream.take(2)]
        self.log("loss", self.weight, on_epoch=True)
        return self.weight * 1.0

    def validation_step(self, batch: torch.Tensor) -> None:
        self.num_validation_steps += 1
        self.log("num_prompts", float(len(self.trainer.datamodule.val_prompts)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def build_trainer(folder, max_steps: int = -1, **options) -> Trainer:
    return Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


# sources


@pytest.mark.parametrize(("split", "stage"), [("train", "fit"), ("val", "fit"), ("val", "validate")])
def test_prompts_without_an_answer_are_refused(tmp_path, split, stage):
    """Catches a split or a stage whose prompts no reward looks at."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "Hi"}\n')
    reward = FunctionReward(lambda answer: 0.0, name="exact")
    sources = {"train": ListSource("Hi"), "val": ListSource("Hi"), split: FileSource(str(path))}
    with pytest.raises(ConfigError, match=f"^data.{split}: 1 of 1 prompts has no answer, and exact"):
        PromptDataModule(**sources).load(stage, PromptRules(build_tokenizer(), (), 100, 20, [reward]))


def test_empty_prompt():
    assert setup_error(PromptDataModule(ListSource("Hi", ""))).startswith("data.train: the prompt 'p1' has no tokens")
    assert "data.val: the prompt 'p0'" in setup_error(PromptDataModule(ListSource("Hi"), val=ListSource("")))


def test_prompt_with_a_token_that_the_policy_does_not_embed():
    """Catches an index past the embeddings, which on a GPU ends the process."""
    tokenizer = build_tokenizer()
    rules = PromptRules(tokenizer, (), 100, 20, vocab_size=len(tokenizer))
    PromptDataModule(ListSource("Hi")).load("fit", rules)
    known = max(tokenizer("Hi").input_ids)
    with pytest.raises(ConfigError, match=r"data\.train: the prompt 'p0' has the token .* no embedding"):
        PromptDataModule(ListSource("Hi")).load("fit", PromptRules(tokenizer, (), 100, 20, vocab_size=known))


def test_source_without_rows():
    assert setup_error(PromptDataModule(ListSource())).startswith("data.train: ListSource has no prompts")


def test_errors_of_sources_name_the_key(tmp_path):
    message = setup_error(PromptDataModule(FileSource(str(tmp_path / "gone.jsonl"))))
    assert message.startswith("data.train: data source path")


def test_data_module_from_yaml(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "Hi"}')
    (tmp_path / "a.yaml").write_text(
        f"data:\n  train:\n    class_path: FileSource\n    init_args: {{path: {tmp_path}/train.jsonl}}\n"
        "  val:\n    class_path: rlplug_rewards.reasoning_gym.ReasoningGymSource\n"
        "    init_args: {task: chain_sum, size: 2}\n"
        "  max_prompt_tokens: 200\n  too_long: filter\n  chat: true\n"
    )
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PromptDataModule, "data")
    parser.add_argument("--config", action="config")
    data = parser.instantiate(parser.parse_args(["--config", str(tmp_path / "a.yaml")])).data
    set_up(data, max_context=300)
    assert train_prompts(data)[0].text == "<bos><|user|>Hi<|assistant|>"
    assert [prompt.uid for prompt in data.val_prompts] == ["chain_sum/seed=0:0", "chain_sum/seed=0:1"]


# characters


def lacks(*prompts: str) -> tuple[PromptDataModule, PreTrainedTokenizerFast]:
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.model.unk_token = "<|system|>"
    return PromptDataModule(ListSource(*prompts)), tokenizer


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (("abcdef", "\u4f60\u597d"), "is 20.0% of all tokens, and all of 'p1'"),
        (("a\u4f60\u597d", "b\u597d\u4f60\u4e16"), "is 55.6% of all tokens, as in 'p0'"),
    ],
)
def test_prompts_that_the_policy_cannot_read_are_refused(prompts: tuple[str, ...], said: str) -> None:
    """Alone catches a run that trains on the unknown token."""
    data, tokenizer = lacks(*prompts)
    assert said in setup_error(data, tokenizer=tokenizer)


def test_some_unknown_characters_are_told() -> None:
    data, tokenizer = lacks("abc\u4f60", "abc")
    with pytest.warns(UserWarning, match=r"1 of 2 prompts have .* lacks: '<\|system\|>', .* is 11.1% .* as in 'p0'"):
        set_up(data, tokenizer=tokenizer)
    assert len(data.train_stream) == 2


# length


def test_refuse_names_prompt_length_limit_and_keys():
    data = PromptDataModule(ListSource("abc", "abcdefg", "abcdef"), max_prompt_tokens=5)
    message = setup_error(data)
    assert message.startswith("data.train: 2 of 3 prompts are longer than 5 tokens, data.max_prompt_tokens (raise it")
    assert "the longest, 'p1', has 8." in message
    assert "data.too_long to filter" in message


def test_context_limits_prompts():
    data = PromptDataModule(ListSource("abc", "abcdefg"), max_prompt_tokens=50)
    message = setup_error(data, max_context=25, max_new_tokens=20)
    assert "1 of 2 prompts are longer than 5 tokens" in message
    assert "context of 25" in message
    assert "model.sampling.max_new_tokens 20" in message


def test_prompt_as_long_as_the_limit_is_kept():
    data = set_up(PromptDataModule(ListSource("abcd"), max_prompt_tokens=5))
    assert len(train_prompts(data)[0].token_ids) == 5
    assert data.counts == {"train": {"read": 1, "too_long": 0, "kept": 1}}


def test_filter_leaves_out_and_says_so(caplog, monkeypatch):
    # Lightning's logger does not hand records to the root logger
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    source, val = ListSource("abc", "abcdefg", "ab"), ListSource("abcdefgh", "x")
    with caplog.at_level(logging.INFO):
        data = set_up(PromptDataModule(source, val=val, max_prompt_tokens=5, too_long="filter"))
    assert [prompt.uid for prompt in train_prompts(data)] == ["p0", "p2"]
    assert [prompt.uid for prompt in data.val_prompts] == ["p1"]
    assert data.counts["train"] == {"read": 3, "too_long": 1, "kept": 2}
    assert data.counts["val"] == {"read": 2, "too_long": 1, "kept": 1}
    assert "data.train: 1 of 3 prompts are longer than 5 tokens and were left out" in caplog.messages
    assert "data.val: 1 of 2 prompts are longer than 5 tokens and were left out" in caplog.messages


def test_filter_that_leaves_none():
    data = PromptDataModule(ListSource("abcdefg"), max_prompt_tokens=5, too_long="filter")
    assert "data.too_long: filter leaves none" in setup_error(data)


def test_no_room_for_prompts():
    message = setup_error(PromptDataModule(ListSource("a")), max_context=20, max_new_tokens=20)
    assert "model.sampling.max_new_tokens is 20, which leaves no tokens for a prompt" in message
    assert "20 tokens" in message


def test_max_prompt_tokens_below_one():
    with pytest.raises(ConfigError, match=r"data\.max_prompt_tokens is 0"):
        PromptDataModule(ListSource("a"), max_prompt_tokens=0)


# splits and stages


def test_fit_reads_each_source_once():
    train, val = ListSource("a", "b"), ListSource("c")
    data = set_up(PromptDataModule(train, val=val))
    assert [prompt.text for prompt in data.val_prompts] == ["c"]
    assert (train.num_reads, val.num_reads) == (1, 1)


def test_a_source_that_gives_a_training_something_else_is_named(monkeypatch):
    monkeypatch.setattr(ListSource, "for_training", lambda self, key: [])
    assert "data.train: ListSource.for_training returned list: return TrainingRows" in setup_error(
        PromptDataModule(ListSource("a"))
    )
    monkeypatch.undo()
    monkeypatch.setattr(AllRows, "prompts", lambda self, *arguments: [])
    assert "data.train: AllRows.prompts returned list: return TrainingPrompts" in setup_error(
        PromptDataModule(ListSource("a"))
    )


def test_validate_does_not_read_training_prompts():
    train = ListSource("a")
    data = set_up(PromptDataModule(train, val=ListSource("c")), stage="validate")
    assert [prompt.text for prompt in data.val_prompts] == ["c"]
    assert train.num_reads == 0
    assert data.state_dict() == {}


def test_validate_without_val():
    assert "data.val is not set" in setup_error(PromptDataModule(ListSource("a")), stage="validate")


def test_overlap_of_train_and_val_is_reported():
    with pytest.warns(UserWarning, match=r"data\.val: 2 of 3 prompts are also in data\.train"):
        set_up(PromptDataModule(ListSource("a", "b"), val=ListSource("b", "c", "a")))


# the stream


def test_stream_of_data_module_uses_its_seed_and_shuffle():
    source = ListSource(*"abcdefghijkl")
    orders = [
        [prompt.text for prompt in set_up(PromptDataModule(source, seed=seed, shuffle=shuffle)).train_stream.take(12)]
        for seed, shuffle in ((0, True), (1, True), (0, False))
    ]
    assert orders[0] != orders[1]
    assert orders[2] == list("abcdefghijkl")


def test_state_loaded_before_setup_is_applied_then_and_only_once():
    source = ListSource(*"abcdefgh")
    data = set_up(PromptDataModule(source))
    data.train_stream.take(11)
    state, expected = data.state_dict(), data.train_stream.take(8)
    early = PromptDataModule(source)
    early.load_state_dict(state)
    assert set_up(early).train_stream.take(8) == expected
    assert set_up(early).train_stream.position == 0


# with Lightning


def test_fit_draws_prompts_resumes_exactly_and_does_not_validate(tmp_path):
    source, val = ListSource(*"abcdefg"), ListSource("x", "y")
    undisturbed = Policy(build_tokenizer())
    build_trainer(tmp_path, 9, enable_checkpointing=False).fit(undisturbed, PromptDataModule(source, val=val))
    assert len(undisturbed.drawn) == 18
    assert undisturbed.num_validation_steps == 0

    first, second = Policy(build_tokenizer()), Policy(build_tokenizer())
    checkpoint = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=5)
    build_trainer(tmp_path, 5, callbacks=[checkpoint]).fit(first, PromptDataModule(source, val=val))
    trainer = build_trainer(tmp_path, 9, enable_checkpointing=False)
    trainer.fit(second, PromptDataModule(source, val=val), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert first.drawn + second.drawn == undisturbed.drawn


def test_resuming_fit_on_other_prompts_is_refused(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=1)
    trainer = build_trainer(tmp_path, 1, callbacks=[checkpoint])
    trainer.fit(Policy(build_tokenizer()), PromptDataModule(ListSource("a", "b")))
    trainer = build_trainer(tmp_path, 2, enable_checkpointing=False)
    with pytest.raises(ConfigError, match="number of prompts"):
        trainer.fit(Policy(build_tokenizer()), PromptDataModule(ListSource("a")), ckpt_path=tmp_path / "last.ckpt")


def test_validate_runs_one_step_also_from_a_checkpoint_of_other_training_prompts(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=1)
    build_trainer(tmp_path, 1, callbacks=[checkpoint]).fit(Policy(build_tokenizer()), PromptDataModule(ListSource("a")))
    policy, data = Policy(build_tokenizer()), PromptDataModule(ListSource("b"), val=ListSource("x", "y", "z"))
    trainer = build_trainer(tmp_path, 1, enable_checkpointing=False)
    (metrics,) = trainer.validate(policy, data, ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert policy.num_validation_steps == 1
    assert metrics == {"num_prompts": 3.0}
    trainer.fit(policy, data)
    assert data.train_stream.epoch == 2, "a new run starts at the first prompt, whatever was validated before"


def test_validate_without_val_stops_in_lightning_too(tmp_path):
    trainer = build_trainer(tmp_path, enable_checkpointing=False)
    with pytest.raises(ConfigError, match=r"data\.val is not set"):
        trainer.validate(Policy(build_tokenizer()), PromptDataModule(ListSource("a")), verbose=False)


def test_lightning_does_not_warn_of_the_data(tmp_path):
    policy, data = Policy(build_tokenizer()), PromptDataModule(ListSource("a", "b"), val=ListSource("x"))
    trainer = build_trainer(tmp_path, 2, enable_checkpointing=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(policy, data)
        trainer.validate(policy, data, verbose=False)
    # what is left: torch's deprecations, which speak of Lightning's own code
    assert [str(w.message) for w in caught if not issubclass(w.category, FutureWarning | DeprecationWarning)] == []
