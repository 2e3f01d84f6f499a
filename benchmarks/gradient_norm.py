"""Share of a step that the exact gradient norm takes, on a 21M-parameter Llama, 4 x 512 tokens per rank.

    torchrun --nproc_per_node 2 benchmarks/gradient_norm.py [ENGINE ...]

Times the norm inside real steps: the same step's other parts are the measure, so that the machine's mood cancels out.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings

import torch

from samestep import models, world
from samestep.engines import build, gradients
from samestep.engines.protocol import Engine
from samestep.precision.plan import Plan
from samestep.recipe import Recipe, parse

CONFIG = (
    "{model_type: llama, vocab_size: 8192, hidden_size: 384, intermediate_size: 1024, num_hidden_layers: 8, "
    "num_attention_heads: 6, num_key_value_heads: 6, tie_word_embeddings: false}"
)
STEPS = 8


def started(engine: str, regime: str, here: world.World) -> tuple[Engine, Recipe, Plan]:
    """An engine with the model, the recipe and the plan."""
    recipe = parse(
        f"{{model: {{config: {CONFIG}, tokenizer: none}}, data: {{path: none}}, train: {{steps: 1, micro_batch: 4}}, "
        f"precision: {{regime: {regime}}}, engine: {{name: {engine}, ranks: {here.size}}}}}"
    )
    model = models.load_model(recipe.model, seed=0)
    plan = build.resolve_plan(recipe, model)
    return build.build(recipe, model, plan, here), recipe, plan


def measure(engine: str, here: world.World) -> tuple[float, float]:
    """Median seconds of a step and of the norm in it, on this rank."""
    live, _, _ = started(engine, "mixed", here)
    torch.manual_seed(here.rank)
    tokens = torch.randint(0, 8192, (4, 512))
    inputs = models.Inputs(input_ids=tokens, labels=tokens, position_ids=None, document_ids=None)
    steps, norms = [], []
    for _ in range(STEPS):
        began = time.perf_counter()
        for turn in live.turns(1):
            loss, _ = models.loss_sum(live.model, inputs, attention="sdpa")
            live.backward(loss / 4096, turn, 1)
        reduced = live.gradients()
        before = time.perf_counter()
        gradients.global_norm(reduced, live.replica, here)
        norms.append(time.perf_counter() - before)
        live.apply(1e-4)
        steps.append(time.perf_counter() - began)
    live.close()
    return statistics.median(steps[1:]), statistics.median(norms[1:])


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    here = world.start(timeout_seconds=600)
    for engine in sys.argv[1:] or ["fsdp", "ddp", "zero1", "zero2", "zero3"]:
        step, norm = measure(engine, here)
        rows = world.gather_numbers([step, norm], here)
        if here.is_main:
            step, norm = (max(row[i] for row in rows) for i in range(2))
            print(f"{engine:6} step {step:.3f} s  norm {norm * 1e3:.1f} ms  share {norm / step:.2%}", flush=True)
    world.stop()


if __name__ == "__main__":
    main()
