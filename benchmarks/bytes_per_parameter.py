"""Bytes per parameter and rank, measured on live tensors and as `samestep.memory` plans them.

    torchrun --nproc_per_node 2 benchmarks/bytes_per_parameter.py [ENGINE ...]

A 20M-parameter Llama; every engine that the number of ranks allows, every regime; after a step and after a backward
pass. `measure` is what tests/distributed/test_memory.py calls too.
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from typing import get_args

import torch
from torch._subclasses import FakeTensor

from samestep import memory, models, world
from samestep.engines import build
from samestep.recipe import override, parse
from samestep.recipe.schema import EngineName, Recipe, RegimeName

CONFIG = (
    "{model_type: llama, vocab_size: 8192, hidden_size: 384, intermediate_size: 1024, num_hidden_layers: 8, "
    "num_attention_heads: 6, num_key_value_heads: 6, tie_word_embeddings: false}"
)
TOKENS = 16
MOMENTS = ("after_step", "after_backward")


def recipe_for(engine: str, regime: str, ranks: int, *, config: str = CONFIG, settings: tuple[str, ...] = ()) -> Recipe:
    """A recipe whose data nobody reads."""
    text = (
        f"{{model: {{config: {config}, tokenizer: none, load_dtype: bfloat16}}, data: {{path: none}}, "
        f"train: {{steps: 2, micro_batch: 1}}, engine: {{name: {engine}, ranks: {ranks}}}, "
        f"precision: {{regime: {regime}, max_lost_update_share: null}}}}"
    )
    return override(parse(text), list(settings)) if settings else parse(text)


def measure(recipe: Recipe, here: world.World) -> dict[str, int]:
    """Bytes of this rank's live tensors `after_backward` and `after_step`, in the second step of a run."""
    # Held, so that nothing new can take their addresses.
    before = _storages()
    model = models.load_model(recipe.model, seed=0)
    plan = build.resolve_plan(recipe, model)
    live = build.build(recipe, model, plan, here)
    del model
    torch.manual_seed(here.rank)
    assert recipe.model.config is not None
    tokens = torch.randint(0, recipe.model.config["vocab_size"], (1, TOKENS))
    inputs = models.Inputs(input_ids=tokens, labels=tokens, position_ids=None, document_ids=None)
    found = {}
    for step in range(2):
        for turn in live.turns(1):
            loss, logits = models.loss_sum(live.model, inputs, attention="sdpa")
            live.backward(loss / TOKENS, turn, 1)
            del loss, logits
        if step:
            found["after_backward"] = _live_bytes(before)
        live.apply(1e-3)
    found["after_step"] = _live_bytes(before)
    live.close()
    return found


def planned(recipe: Recipe) -> memory.Estimate:
    """What the plan says about the same recipe, without a weight."""
    return memory.estimate(recipe, models.load_meta_model(recipe.model))


def _live_bytes(before: dict[int, torch.UntypedStorage]) -> int:
    # A thread of the communication library holds what it has sent until it is scheduled again: nothing of the engine.
    time.sleep(0.2)
    return sum(storage.size() for address, storage in _storages().items() if address not in before)


def _storages() -> dict[int, torch.UntypedStorage]:
    """Every tensor storage that Python can reach, by address."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            gradient = thing.grad if thing.is_leaf else None
            for tensor in (thing, gradient):
                local = getattr(tensor, "_local_tensor", tensor)
                if local is not None and local.device.type != "meta" and not isinstance(local, FakeTensor):
                    storage = local.untyped_storage()
                    if storage.size():
                        found[storage.data_ptr()] = storage
    return found


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    here = world.start(timeout_seconds=600)
    for engine in sys.argv[1:] or get_args(EngineName):
        if engine == "single" and here.size > 1:
            continue
        for regime in get_args(RegimeName):
            # DeepSpeed's own bucket of 500 million elements would hide everything else.
            settings = ("engine.bucket_elements=1000000",) if engine.startswith("zero") else ()
            recipe = recipe_for(engine, regime, here.size, settings=settings)
            found = measure(recipe, here)
            rows = world.gather_numbers([found[moment] for moment in MOMENTS], here)
            if here.is_main:
                _show(recipe, [max(row[i] for row in rows) for i in range(len(MOMENTS))])
    world.stop()


def _show(recipe: Recipe, measured: list[float]) -> None:
    plan = planned(recipe)
    cells = []
    for moment, found in zip(MOMENTS, measured, strict=True):
        wanted = getattr(plan, f"{moment}_bytes") / plan.parameters
        cells.append(f"{moment}: measured {found / plan.parameters:6.3f}, planned {wanted:6.3f}")
    print(f"{recipe.engine.name:6} {recipe.precision.regime:17} {'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
