"""What a checkpoint costs: samestep's, accelerate's save_state and DeepSpeed's save_checkpoint, alternating in one run.

    PYTHONPATH=. torchrun --nproc_per_node 2 benchmarks/checkpoint_cost.py FOLDER [--rounds 3] [--layers 30]

A Llama of 135M parameters, fp32 masters and both moments of AdamW, sharded over the ranks: by FSDP2 for samestep and
accelerate, by ZeRO-3 for samestep and DeepSpeed. samestep and DeepSpeed save the same live engine. Every one saves into
FOLDER and loads from it again, in turn; medians over the rounds are printed as a table. `stall` is how long
the training waits; `memory` the growth of a rank's resident memory while it saves or loads, the larger of the ranks.
Files that were just written are read from the page cache.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import shutil
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist

from samestep import models, world
from samestep.checkpoint import store
from samestep.engines import build, loading
from samestep.recipe import Recipe
from samestep.training.checkpoints import Checkpoints, Course
from samestep.world import World

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
MOMENTS = ("exp_avg", "exp_avg_sq")


class Contender(Protocol):
    name: str

    def save(self, folder: Path) -> None: ...

    def finish(self) -> None:
        """Waits for what is written in the background."""

    def load(self, folder: Path) -> None: ...


class Samestep:
    """Our checkpoints of a live engine. Without `durable` nothing is flushed to the disk, as DeepSpeed does not."""

    def __init__(self, live: SimpleNamespace, *, asynchronous: bool = False, durable: bool = True) -> None:
        self.name = f"samestep {live.recipe.engine.name}"
        self.name += (" asynchronous" if asynchronous else "") + ("" if durable else " without fsync")
        self._durable = durable
        self._live = live
        checkpoint = live.recipe.checkpoint.model_copy(update={"asynchronous": asynchronous})
        self._recipe = live.recipe.model_copy(update={"checkpoint": checkpoint})
        self._checkpoints: Any = None
        self._step = 0

    def save(self, folder: Path) -> None:
        if self._checkpoints is None:
            loader: Any = SimpleNamespace(rows_per_step=2, examples=SimpleNamespace(sha256="0" * 64))
            course = Course(recipe=self._recipe, plan=self._live.plan, loader=loader)
            monitor = SimpleNamespace(moved=[], restore=lambda _: None)
            stepper: Any = SimpleNamespace(engine=self._live.engine, scale=None, monitor=monitor)
            self._checkpoints = Checkpoints(course, stepper, folder, self._live.world)
        self._step += 1
        with contextlib.ExitStack() as patched:
            if not self._durable:
                patched.enter_context(mock.patch("os.fsync"))
            self._checkpoints.save(self._step)

    def finish(self) -> None:
        self._checkpoints.finish()

    def load(self, folder: Path) -> None:
        self._checkpoints.resume(store.newest(folder), allow_changes=False)


class DeepSpeed:
    """DeepSpeed's own checkpoints of the engine that samestep's zero3 drives."""

    name = "DeepSpeed ZeRO-3 save_checkpoint"

    def __init__(self, live: SimpleNamespace) -> None:
        self._engine = live.engine.model

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), tag="one")

    def finish(self) -> None:
        pass

    def load(self, folder: Path) -> None:
        assert self._engine.load_checkpoint(str(folder), tag="one")[0] is not None


class Accelerate:
    """accelerate's save_state of a model on FSDP2, with sharded state dicts."""

    name = "accelerate FSDP2 save_state"

    def __init__(self, model: torch.nn.Module) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
        from accelerate.utils import DistributedType

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type="SHARDED_STATE_DICT",
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        self._accelerator = Accelerator(cpu=True)
        # accelerate offers FSDP on accelerators only; its code for it works on the CPU as well.
        PartialState().distributed_type = self._accelerator.state.distributed_type = DistributedType.FSDP
        self._accelerator.state.fsdp_plugin = plugin
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        prepared = self._accelerator.prepare(model, optimizer)
        self._model, self._optimizer = prepared
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        self._accelerator.save_state(str(folder))

    def finish(self) -> None:
        pass

    def load(self, folder: Path) -> None:
        self._accelerator.load_state(str(folder))


def live_engine(name: str, layers: int, here: World) -> SimpleNamespace:
    """An engine with the optimizer's state of a run under way."""
    recipe = Recipe.model_validate(
        {
            "model": {"config": CONFIG | {"num_hidden_layers": layers}, "tokenizer": "none", "load_dtype": "float32"},
            "data": {"path": "none"},
            "engine": {"name": name, "ranks": here.size},
            "train": {"steps": 2, "micro_batch": 1},
        }
    )
    model = loading.load_model(recipe, here)
    plan = build.resolve_plan(recipe, model)
    engine = build.build(recipe, model, plan, here)
    engine.prepare(MOMENTS, 1)
    for shard in engine.masters():
        for key in MOMENTS:
            engine.moments(shard.name)[key].normal_().abs_()
    engine.refresh()
    return SimpleNamespace(recipe=recipe, plan=plan, engine=engine, world=here)


def contenders(layers: int, here: World) -> list[Contender]:
    fsdp, zero3 = live_engine("fsdp", layers, here), live_engine("zero3", layers, here)
    model = models.load_model(fsdp.recipe.model, seed=0)
    return [
        Samestep(fsdp),
        Samestep(fsdp, asynchronous=True),
        Samestep(fsdp, durable=False),
        Accelerate(model),
        Samestep(zero3),
        Samestep(zero3, asynchronous=True),
        Samestep(zero3, durable=False),
        DeepSpeed(zero3),
    ]


def resident(field: str = "VmRSS") -> int:
    """Bytes of this process in memory, from /proc; VmHWM is the most since `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Starts VmHWM anew, without what the allocator keeps of memory that is free: it would hide what is taken next."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc has it
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def measured(work: Callable[[], None], after: Callable[[], None] = lambda: None) -> tuple[float, float, int]:
    """Seconds of `work`, seconds until `after` is done as well, and growth of resident memory, on this rank."""
    dist.barrier()
    forget_peak()
    before, began = resident(), time.perf_counter()
    work()
    waited = time.perf_counter() - began
    after()
    whole = time.perf_counter() - began
    grown = resident("VmHWM") - before
    dist.barrier()
    return waited, whole, grown


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=30)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    here = world.start(timeout_seconds=600)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    listed = contenders(asked.layers, here)
    for _ in range(asked.rounds):
        for number, contender in enumerate(listed):
            folder = asked.folder / str(number)
            if here.is_main:
                folder.mkdir(parents=True)
                os.sync()  # what the one before left must not be written on this one's time
            save = measured(lambda c=contender, f=folder: c.save(f), contender.finish)
            load = measured(lambda c=contender, f=folder: c.load(f))
            rows = world.gather_numbers([*save, *load], here)
            row = found[contender.name]
            names = ("stall", "save", "save memory", "", "load", "load memory")
            for place, name in enumerate(names):
                row[name].append(max(r[place] for r in rows))
            row["bytes"].append(size_of(folder))
            dist.barrier()
            if here.is_main:
                shutil.rmtree(folder)
    if here.is_main:
        show(found)
    world.stop()


def show(found: dict[str, dict[str, list[float]]]) -> None:
    print("| | MB on disk | stall (s) | until written (s) | load (s) | memory to save (MB) | memory to load (MB) |")
    print("|---|---|---|---|---|---|---|")
    for name, row in found.items():
        middle = {key: statistics.median(values) for key, values in row.items()}
        seconds = " | ".join(
            f"{middle[key]:.2f} ({min(row[key]):.2f}-{max(row[key]):.2f})" for key in ("stall", "save", "load")
        )
        memory = " | ".join(f"{max(row[key]) / 1e6:.0f}" for key in ("save memory", "load memory"))
        print(f"| {name} | {middle['bytes'] / 1e6:.0f} | {seconds} | {memory} |", flush=True)


if __name__ == "__main__":
    main()
