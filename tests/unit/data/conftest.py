"""A tokenizer of whole words, small enough to work out every id by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
WORDS = ["###", "Instruction:", "Input:", "Response:", "a", "b", "c", "d", "e", "bc", "7", "Q:", "A:"]
VOCABULARY = {word: index for index, word in enumerate(SPECIAL + WORDS)}

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|>{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(*, eos: str | None = "</s>", chat_template: str | None = None, ending: str = "") -> Any:
    """Words are split at white space; `<s>` comes first and, if given, the special token `ending` last."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"<s> $A {ending}".strip(), special_tokens=[(word, VOCABULARY[word]) for word in ("<s>", "</s>")]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos, unk_token="<unk>", pad_token="<pad>"
    )
    fast.chat_template = chat_template
    return fast


@pytest.fixture
def tokenizer() -> Any:
    return build_tokenizer(chat_template=CHAT_TEMPLATE)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes rows as JSON lines and gives the path."""

    def write_rows(*rows: object, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write_rows
