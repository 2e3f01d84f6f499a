"""How the files in this folder were made, by the first version of the checkpoint format:

    PYTHONPATH=. torchrun --nproc_per_node 2 tests/unit/checkpoint/version_1/make.py tests/unit/checkpoint/version_1

`model` and `rows.jsonl` are what the run was made from; `step-00000002` is its checkpoint after two of four steps,
`masters.safetensors` the weights at that step and `losses.json` the losses of all four, as a run that never stopped had
them. Later versions of samestep read them; do not make them again.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from samestep import world
from samestep.recipe import Recipe
from samestep.training.rank import run
from samestep.training.request import Request
from tests.small_runs import make_model, make_tokenizer, write_rows

RECIPE = {
    # Relative, so that the files can be anywhere.
    "model": {"path": "model", "freeze": ["model.norm.*"]},
    "data": {"path": "rows.jsonl", "format": "text"},
    "precision": {"max_lost_update_share": None},
    "engine": {"name": "fsdp", "ranks": 2},
    "train": {"steps": 4, "micro_batch": 2, "optimizer": {"lr": 1e-2, "weight_decay": 0.1}, "export": False},
    "checkpoint": {"every": 2},
}
SIZES = {"hidden_size": 8, "intermediate_size": 13, "num_hidden_layers": 1, "num_attention_heads": 2}


def main(folder: Path) -> None:
    os.chdir(folder)
    here = world.start(timeout_seconds=60)
    if here.is_main:
        make_model(**SIZES).save_pretrained("model")
        make_tokenizer().save_pretrained("model")
        write_rows(Path(), 12)
        Path("whole").mkdir()
        Path("half").mkdir()
    world.gather_numbers([0.0], here)
    recipe = Recipe.model_validate(RECIPE)
    run(Request(recipe=recipe, out=Path("whole")))
    run(Request(recipe=recipe, out=Path("half"), stop_after=2, keep_masters=True))
    if here.is_main:
        losses = [json.loads(line)["loss"] for line in Path("whole/steps.jsonl").read_text().splitlines()]
        Path("losses.json").write_text(json.dumps(losses) + "\n")
        os.rename("half/checkpoints/step-00000002", "step-00000002")
        os.rename("half/masters.safetensors", "masters.safetensors")
        shutil.rmtree("whole")
        shutil.rmtree("half")
    world.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
