"""Ranks that are killed while they save: whenever it happens, the run goes on from a whole checkpoint.

    PYTHONPATH=. python benchmarks/kill_during_save.py [--tries 60] [--seed 0]

Each try starts 2 or 3 ranks that take up the newest checkpoint of one run folder and then save one step after the
other, synchronously or in the background. At a random moment SIGKILL goes to one of them or to all; the others of a
rank that died alone have a few seconds to end by themselves, then a launcher would end them. After it every checkpoint
in the folder must be whole, `latest` must name one, none that was complete may be lost, and what the next try takes up
must have the values of its step. Prints a line a try and a summary; exit code 1 when something was lost.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from samestep.checkpoint import store
from samestep.checkpoint.manifest import damages, read_manifest
from samestep.engines.protocol import Replica, Shard
from samestep.precision.plan import resolve
from samestep.recipe import Recipe
from samestep.training.checkpoints import Checkpoints, Course
from samestep.world import World

SHAPES = {"embed": (515, 45), "weight": (301, 73), "bias": (301,), "head": (7, 11, 13)}
MOMENTS = ("exp_avg", "exp_avg_sq")
SECONDS_TO_END = 3.0


class Slices:
    """An engine as a checkpoint sees it: this rank's part of one flat buffer, cut without regard to tensors as ZeRO's
    are."""

    def __init__(self, here: World) -> None:
        self.replica, self.updates = Replica(index=0, count=1), 0
        total = sum(torch.Size(shape).numel() for shape in SHAPES.values())
        begin, end = (total * r // here.size for r in (here.rank, here.rank + 1))
        self._shards: list[Shard] = []
        self._moments: dict[str, dict[str, torch.Tensor]] = {}
        offset = 0
        for name, shape in SHAPES.items():
            numel = torch.Size(shape).numel()
            first, last = min(max(begin - offset, 0), numel), min(max(end - offset, 0), numel)
            self._shards.append(Shard(name=name, shape=shape, start=first, values=torch.zeros(last - first)))
            self._moments[name] = {key: torch.zeros(last - first) for key in MOMENTS}
            offset += numel

    def masters(self) -> list[Shard]:
        return self._shards

    def moments(self, name: str) -> dict[str, torch.Tensor]:
        return self._moments[name]

    def prepare(self, keys: list[str], updates: int) -> None:
        self.updates = updates

    def refresh(self) -> None:
        pass

    def step(self, step: int) -> None:
        self.updates = step
        for values, wanted in self._wanted(step):
            values.copy_(wanted)

    def is_of(self, step: int) -> bool:
        return all(torch.equal(values, wanted) for values, wanted in self._wanted(step))

    def _wanted(self, step: int) -> Any:
        """Values that say which step, tensor and element they are of."""
        for number, shard in enumerate(self._shards):
            places = torch.arange(shard.start, shard.start + shard.values.numel(), dtype=torch.float32)
            for part, values in enumerate((shard.values, *self._moments[shard.name].values())):
                yield values, places * (part + 1) + 1000.0 * number + step / 1024


def rank(number: int, size: int, out: Path, meeting: str, asynchronous: bool) -> None:
    """What a rank does until it is killed."""
    dist.init_process_group("gloo", store=dist.FileStore(meeting, size), rank=number, world_size=size)
    here = World(rank=number, size=size, local_rank=number, device=torch.device("cpu"))
    recipe = Recipe.model_validate(
        {
            "model": {"path": "none"},
            "data": {"path": "none"},
            "engine": {"name": "zero1", "ranks": 6, "timeout_seconds": 60},
            "train": {"steps": 10**6, "micro_batch": 1},
            "checkpoint": {"every": 1, "keep": 2, "asynchronous": asynchronous},
        }
    )
    model = torch.nn.ParameterDict({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    plan = resolve(recipe.precision, model, casts_frozen=True, ignored_modules=[])
    loader: Any = SimpleNamespace(rows_per_step=6, examples=SimpleNamespace(sha256="0" * 64))
    engine = Slices(here)
    stepper: Any = SimpleNamespace(engine=engine, scale=None, monitor=SimpleNamespace(moved=[], restore=lambda _: None))
    checkpoints = Checkpoints(Course(recipe=recipe, plan=plan, loader=loader), stepper, out, here)
    step = 0
    if store.complete(out / store.FOLDER):
        step = checkpoints.resume(store.newest(out), allow_changes=False).step
        if not engine.is_of(step):
            (out / "wrong").write_text(f"rank {number} of {size} took up other values than those of step {step}\n")
            return
    while True:
        step += 1
        engine.step(step)
        checkpoints.save(step)


def one_try(out: Path, chance: random.Random, number: int) -> tuple[str, str | None]:
    """Starts ranks and kills. What was done, and what is wrong after it, if anything."""
    size = chance.choice((2, 3))
    asynchronous = chance.random() < 0.3
    before = newest_step(out)
    with tempfile.TemporaryDirectory() as meeting:
        ranks = [start(rank, n, size, out, f"{meeting}/store", asynchronous) for n in range(size)]
        wait_for(lambda: newest_step(out) > before or (out / "wrong").exists(), ranks)
        time.sleep(chance.uniform(0.0, 0.3))
        complete = newest_step(out)
        everyone = chance.random() < 0.4
        victims = ranks if everyone else [chance.choice(ranks)]
        whom = "all" if everyone else f"rank {ranks.index(victims[0])}"
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        end(ranks)
    partial = any(path.name.endswith(".partial") for path in (out / store.FOLDER).iterdir())
    place = "while it wrote" if partial else "between two"
    done = f"{number:3}: {size} ranks, {'asynchronous' if asynchronous else 'synchronous'}, killed {whom} {place}"
    return f"{done}; goes on from step {newest_step(out)}", wrong_with(out, complete)


def wrong_with(out: Path, complete: int) -> str | None:
    """What is lost in a run folder in which step `complete` was complete before; None when nothing is."""
    if (out / "wrong").exists():
        return (out / "wrong").read_text()
    found = store.complete(out / store.FOLDER)
    for folder in found:
        if broken := damages(folder, read_manifest(folder)):
            return f"{folder.name}: {broken[0]}"
    if newest_step(out) < complete:
        return f"step {complete} was complete and is gone"
    latest = (out / store.FOLDER / "latest").read_text().strip()
    if latest not in [folder.name for folder in found]:
        return f"latest is {latest}, which is not there"
    return None


def newest_step(out: Path) -> int:
    found = store.complete(out / store.FOLDER)
    return int(found[-1].name.removeprefix("step-")) if found else 0


def start(work: Any, *arguments: Any) -> int:
    """A forked process: everything is imported already."""
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        work(*arguments)
    finally:
        os._exit(1)


def wait_for(condition: Any, ranks: list[int]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
            raise TimeoutError("no checkpoint within 60 seconds")
        time.sleep(0.005)


def end(ranks: list[int]) -> None:
    """Waits for the ranks, for some seconds; then they are killed as well."""
    deadline, left = time.monotonic() + SECONDS_TO_END, list(ranks)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0]
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    chance = random.Random(asked.seed)
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        for number in range(1, asked.tries + 1):
            done, wrong = one_try(out, chance, number)
            print(done, flush=True)
            if wrong is not None:
                print(f"LOST: {wrong}")
                return 1
            seen["while it wrote"] += "while it wrote" in done
            seen["all"] += "killed all" in done
    one, written = asked.tries - seen["all"], seen["while it wrote"]
    print(
        f"{asked.tries} tries, nothing lost: {one} times one rank was killed, {seen['all']} times all; "
        f"{written} times a checkpoint was half written"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
