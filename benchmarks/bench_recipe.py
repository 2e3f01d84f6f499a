"""Writes what `samestep bench` needs to be run on a CPU: a recipe, random rows, and a tokenizer for them.

    python benchmarks/bench_recipe.py FOLDER [--length 512] [--rows 256]

A Llama of 20.8M parameters, grouped queries, tied embeddings; every row has as many tokens as the next one.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 16384
RECIPE = """\
name: bench
model:
  config: {{model_type: llama, vocab_size: {vocabulary}, hidden_size: 384, intermediate_size: 1024,
           num_hidden_layers: 9, num_attention_heads: 6, num_key_value_heads: 2, tie_word_embeddings: true}}
  tokenizer: tokenizer
  load_dtype: float32
data: {{path: rows.jsonl, format: text, max_tokens: {length}, shuffle: true}}
precision: {{regime: mixed}}
engine: {{name: fsdp, ranks: 2}}
train: {{steps: 1000, micro_batch: 4, optimizer: {{lr: 1e-4}}}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=256)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {f"w{n}": n for n in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=asked.length,
    )
    fast.save_pretrained(asked.folder / "tokenizer")
    drawn = random.Random(0)
    # One token less: the end of the text is one.
    rows = [[f"w{drawn.randrange(3, VOCABULARY)}" for _ in range(asked.length - 1)] for _ in range(asked.rows)]
    text = "".join(json.dumps({"text": " ".join(row)}) + "\n" for row in rows)
    (asked.folder / "rows.jsonl").write_text(text, encoding="utf-8")
    (asked.folder / "recipe.yaml").write_text(
        RECIPE.format(vocabulary=VOCABULARY, length=asked.length), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
