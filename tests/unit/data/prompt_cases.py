"""A tokenizer of one token a character, a source of given prompts, and a loaded data module."""

from collections.abc import Iterator

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlplug.data.datamodule import PromptDataModule
from rlplug.data.prompt_encoder import PromptRules
from rlplug.data.sources import PromptRow, PromptSource
from rlplug.errors import ConfigError
from rlplug.types import Prompt

SPECIAL = ["<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>"]
BOS, EOS, SYSTEM, USER, ASSISTANT = range(len(SPECIAL))
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'tool' %}"
    "{{ raise_exception('No tools here.') }}{% endif %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER_MESSAGE = {"role": "user", "content": "Hi"}


def ids(text: str) -> tuple[int, ...]:
    return tuple(len(SPECIAL) + CHARACTERS.index(character) for character in text)


def build_tokenizer(chat_template: str | None = CHAT_TEMPLATE, wrap: str = "<bos> $A <eos>") -> PreTrainedTokenizerFast:
    """One token a character; by itself it writes ``wrap`` around a text."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL + CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=wrap, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens=SPECIAL[2:],
        chat_template=chat_template,
        name_or_path="models/small",
    )


class ListSource(PromptSource):
    """Prompts as given, named p0, p1, ..."""

    def __init__(self, *prompts: str | list[dict[str, str]]) -> None:
        self.prompts = prompts
        self.num_reads = 0

    def rows(self) -> Iterator[PromptRow]:
        self.num_reads += 1
        for index, prompt in enumerate(self.prompts):
            yield PromptRow(f"p{index}", prompt, f"answer {index}", {"index": index})


def set_up(
    data: PromptDataModule,
    stage: str = "fit",
    tokenizer: PreTrainedTokenizerFast | None = None,
    max_context: int = 100,
    max_new_tokens: int = 20,
) -> PromptDataModule:
    data.load(stage, PromptRules(tokenizer or build_tokenizer(), (), max_context, max_new_tokens))
    return data


def train_prompts(data: PromptDataModule) -> list[Prompt]:
    """Return one epoch in the order of the source."""
    return sorted(data.train_stream.take(len(data.train_stream)), key=lambda prompt: prompt.uid)


def setup_error(data: PromptDataModule, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        set_up(data, **options)
    return str(caught.value)
