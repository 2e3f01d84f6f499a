"""Memory that an export takes: at the end of a run, and of a checkpoint by `samestep checkpoint export`.

    PYTHONPATH=. torchrun --nproc_per_node 2 benchmarks/export_memory.py FOLDER [--layers 30]

A Llama of 135M parameters stored in bf16 in FOLDER, on FSDP2. Growth of the main rank's resident memory in each case;
for comparison, that of loading the model with transformers and saving it.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.checkpoint_cost import CONFIG, forget_peak, resident
from samestep import models, world
from samestep.checkpoint import store
from samestep.engines import build, loading
from samestep.recipe import Recipe
from samestep.training.checkpoints import Checkpoints, Course
from samestep.training.exporting import Trained, export, export_checkpoint
from samestep.world import World
from tests.small_runs import make_tokenizer


def grown(work: Callable[[], Any]) -> float:
    """MB by which this process's memory grew at most while it did this."""
    forget_peak()
    before = resident()
    work()
    return (resident("VmHWM") - before) / 1e6


def store_model(folder: Path, layers: int) -> None:
    settings = {name: value for name, value in CONFIG.items() if name != "model_type"}
    config = AutoConfig.for_model("llama", **settings, num_hidden_layers=layers)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=30)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    here = world.start(timeout_seconds=600)
    model = asked.folder / "model"
    if here.is_main:
        store_model(model, asked.layers)
    world.gather_numbers([0.0], here)
    recipe = Recipe.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"path": "none"},
            "engine": {"name": "fsdp", "ranks": here.size},
            "train": {"steps": 1, "micro_batch": 1},
        }
    )
    measure(recipe, asked.folder, here)
    world.stop()


def measure(recipe: Recipe, folder: Path, here: World) -> None:
    loaded = loading.load_model(recipe, here)
    plan = build.resolve_plan(recipe, loaded)
    engine = build.build(recipe, loaded, plan, here)
    del loaded
    trained = Trained(recipe=recipe, plan=plan, engine=engine, world=here, steps=1, out=folder)
    tokenizer = models.load_tokenizer(recipe.model)
    found = {"at the end of a run": grown(lambda: export(trained, tokenizer, keep_masters=True))}
    loader: Any = SimpleNamespace(rows_per_step=2, examples=SimpleNamespace(sha256="0" * 64))
    stepper: Any = SimpleNamespace(engine=engine, scale=None, monitor=SimpleNamespace(moved=[]))
    Checkpoints(Course(recipe=recipe, plan=plan, loader=loader), stepper, folder, here).save(1)
    if not here.is_main:
        return
    found["of a checkpoint"] = grown(lambda: export_checkpoint(store.newest(folder), folder / "one"))
    found["of a checkpoint, in fp32"] = grown(
        lambda: export_checkpoint(store.newest(folder), folder / "two", dtype="float32")
    )
    path = recipe.model.path
    whole = lambda: AutoModelForCausalLM.from_pretrained(path, dtype="auto").save_pretrained(folder / "three")  # noqa: E731
    found["loaded and saved by transformers"] = grown(whole)
    size = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
    print(f"the model's files: {size / 1e6:.0f} MB")
    for name, megabytes in found.items():
        print(f"{name}: {megabytes:.0f} MB")


if __name__ == "__main__":
    main()
