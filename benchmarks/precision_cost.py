"""What seeing and choosing the precision costs: shares of a step, on a 21M-parameter Llama, 4 x 512 tokens per rank.

    PYTHONPATH=. torchrun --nproc_per_node 2 benchmarks/precision_cost.py [ENGINE ...]

Times each part inside real steps of regime `full`. `guard` and `verify` run once in a run; their columns say what
part of one step that is. The monitor runs every `precision.measure_every` steps; its column is for the default
interval. The stochastic cast is timed in steps of `mixed-stochastic` and set against the same step of `full`: its time
does not depend on the tokens, and a CPU without bf16 instructions multiplies bf16 so slowly that a share of its own
step would flatter.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gradient_norm import started
from samestep import world
from samestep.data import Batch
from samestep.engines import deepspeed, stochastic_gather
from samestep.recipe.schema import Precision
from samestep.training import guard
from samestep.training.steps import Stepper

STEPS = 7
INTERVAL = Precision.model_fields["measure_every"].default


class Clock:
    """Seconds spent in the functions it wraps, since `take` was last called."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, name: str, label: str) -> None:
        """Replaces the function `owner.name` by one that adds its time to `label`."""
        timed: Callable[..., Any] = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return timed(*arguments, **named)
            finally:
                self.seconds[label] += time.perf_counter() - began

        setattr(owner, name, call)

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, defaultdict(float)
        return taken


def measure(engine: str, regime: str, shape: tuple[int, int], here: world.World, clock: Clock) -> dict[str, float]:
    """Median seconds of a step on rows and tokens of `shape`, and of each timed part in it, on this rank."""
    live, recipe, plan = started(engine, regime, here)
    stepper = Stepper(live, recipe, here, plan)
    clock.wrap(stepper.monitor, "before", "monitor")
    clock.wrap(stepper.monitor, "after", "monitor")
    clock.wrap(stepper, "_observe", "verify")
    clock.take()
    guard.refuse_lost_updates(live.masters(), peak_lr=1e-3, limit=1.0, world=here)
    looked = clock.take()
    torch.manual_seed(here.rank)
    tokens = torch.randint(0, 8192, shape)
    batch = Batch(
        input_ids=tokens,
        labels=tokens,
        position_ids=None,
        document_ids=None,
        label_tokens=tokens.numel(),
        tokens=tokens.numel(),
    )
    data: Any = SimpleNamespace(
        micro_steps=1, label_tokens=tokens.numel() * here.size, batch=lambda _micro, _rank: batch
    )
    rows = []
    for index in range(STEPS):
        began = time.perf_counter()
        stepper.step(data, index=index, lr=1e-4, measure=True, facts=True)
        rows.append(clock.take() | {"step": time.perf_counter() - began})
    live.close()
    return looked | {part: statistics.median(row.get(part, 0.0) for row in rows[1:]) for part in rows[1]}


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    here = world.start(timeout_seconds=600)
    clock = Clock()
    clock.wrap(guard, "refuse_lost_updates", "guard")
    clock.wrap(stochastic_gather, "stochastic_to_bfloat16", "cast")
    clock.wrap(deepspeed, "stochastic_to_bfloat16", "cast")
    if here.is_main:
        print(
            "| engine | step s | guard, once | verify, once | monitor | stochastic cast |\n|---|---|---|---|---|---|",
            flush=True,
        )
    for engine in sys.argv[1:] or ["fsdp", "zero3"]:
        mine = measure(engine, "full", (4, 512), here, clock)
        mine["cast"] = measure(engine, "mixed-stochastic", (1, 16), here, clock)["cast"]
        rows = world.gather_numbers([mine[part] for part in ("step", "guard", "verify", "monitor", "cast")], here)
        step, looked, verify, monitor, cast = (max(column) for column in zip(*rows, strict=True))
        if here.is_main:
            shares = [f"{part / step:.2%}" for part in (looked, verify, monitor / INTERVAL, cast)]
            print(f"| {engine} | {step:.3f} | {' | '.join(shares)} |", flush=True)
    world.stop()


if __name__ == "__main__":
    main()
