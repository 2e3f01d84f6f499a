"""Everything the demo trains on, made here from a seed: tokenizer, two data sets, and the shape of a fresh model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from .places import people
from .tasks import FINE_TUNING, PRETRAINING, Row, draw

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PRETRAINING_ROWS = 2000
FINE_TUNING_ROWS = 1600
VOCABULARY_SIZE = 640
PAD, BEGIN, END = "<pad>", "<s>", "</s>"
CHAT_TEMPLATE = r"""{{- bos_token -}}
{%- for message in messages -%}
    {{- '### ' + message['role'] + ':\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
    {%- else -%}
        {{- message['content'] -}}
    {%- endif -%}
    {{- '\n\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '### assistant:\n' -}}{%- endif -%}
"""


def build(folder: Path, seed: int = 0) -> None:
    """Write tokenizer/, pretrain.jsonl, instructions.jsonl and config.json to `folder`.

    The bytes of every file depend on `seed` alone. The rows have the keys instruction, input and output (the format
    `alpaca`). config.json is a transformers config of a fresh model, for `model.config` in a recipe.
    """
    inhabitants = people(seed)
    pretraining = draw(PRETRAINING, inhabitants, PRETRAINING_ROWS, Random(f"pretraining/{seed}"))
    fine_tuning = draw(FINE_TUNING, inhabitants, FINE_TUNING_ROWS, Random(f"fine-tuning/{seed}"))
    tokenizer = trained_tokenizer([*pretraining, *fine_tuning])
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "pretrain.jsonl", pretraining)
    write_rows(folder / "instructions.jsonl", fine_tuning)
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "config.json").write_text(json.dumps(model_config(tokenizer), indent=2) + "\n", encoding="utf-8")


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def model_config(tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    """Return the config of a Llama with grouped-query attention and tied embeddings, 0.8 million parameters."""
    return {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def texts(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the rows as the model will read them, so that the headings of a prompt become few tokens."""
    for row in rows:
        given = f"### Input:\n{row['input']}\n\n" if row["input"] else ""
        yield f"### Instruction:\n{row['instruction']}\n\n{given}### Response:\n{row['output']}"


def trained_tokenizer(rows: Iterable[Row]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of VOCABULARY_SIZE tokens on `rows`; any text can be encoded with it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PAD, BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(rows), trainer)
    begin = (BEGIN, tokenizer.token_to_id(BEGIN))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[begin])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BEGIN,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
