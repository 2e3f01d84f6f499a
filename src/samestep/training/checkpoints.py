"""Saving a run while it goes on, and taking one up again."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from samestep.checkpoint import store
from samestep.checkpoint.frozen import refuse_others
from samestep.checkpoint.manifest import Manifest, StoredFile, damages, read_manifest, stored_file
from samestep.checkpoint.metadata import NAME as METADATA
from samestep.checkpoint.state import kept_by, master_names, optimizer_keys, state_of, stored
from samestep.checkpoint.tensors import read_tensors, write_tensors
from samestep.data import Loader
from samestep.engines.protocol import Shard
from samestep.errors import CheckpointError, OutputError, RunError, SamestepError
from samestep.precision.plan import Plan, described
from samestep.recipe.schema import Recipe
from samestep.training.machine import versions
from samestep.training.steps import Stepper
from samestep.world import World, gather_objects

# What may differ when a run goes on: where things are, how they are computed, what is looked at. None of it changes
# the run but in last bits; data and parameters are compared by themselves.
_FREE = (
    "name",
    "model.path",
    "model.tokenizer",
    "model.lora.export_merged",
    "data.path",
    "precision.measure_every",
    "precision.max_lost_update_share",
    "precision.export_",
    "engine.",
    "train.micro_batch",
    "train.accumulation",
    "train.evaluate_every",
    "train.activation_checkpointing",
    "train.on_non_finite",
    "train.export",
    "checkpoint.",
    "log.",
)

_WHOLE = "The checkpoint before is whole; go on from it with --resume."


@dataclass(frozen=True, kw_only=True)
class Course:
    """What makes a run the same run: its recipe, its plan, the rows of each of its steps, and the weights that it does
    not train, by their digest on the main rank."""

    recipe: Recipe
    plan: Plan
    loader: Loader
    frozen_sha256: str | None = None


class Checkpoints:
    """The checkpoints of one run, on one rank. Every rank must make the same calls."""

    def __init__(self, course: Course, stepper: Stepper, out: Path, world: World) -> None:
        self._course, self._stepper, self._world = course, stepper, world
        self._folder = out / store.FOLDER
        self._recipe = course.recipe.checkpoint
        self._timeout = datetime.timedelta(seconds=course.recipe.engine.timeout_seconds)
        # What is written in the background must not mix its messages with those of the steps.
        apart = world.size > 1 and (self._recipe.asynchronous or world.device.type != "cpu")
        self._group: dist.ProcessGroup | None = None
        if apart:
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=self._timeout))
        self._pending: threading.Thread | None = None
        self._copies: list[torch.Tensor] = []
        self._failure: SamestepError | None = None
        self._last = time.monotonic()
        self._saved: int | None = None

    @property
    def wanted(self) -> bool:
        """Whether the recipe asks for checkpoints during the run."""
        return self._recipe.every is not None or self._recipe.minutes is not None

    def overdue(self) -> bool:
        """Whether checkpoint.minutes have passed since the last one, by this rank's clock."""
        minutes = self._recipe.minutes
        return minutes is not None and time.monotonic() - self._last >= 60 * minutes

    def due(self, step: int) -> bool:
        """Whether checkpoint.every asks for one after this step."""
        return falls_on(step, self._recipe.every)

    def save(self, step: int) -> None:
        """Writes a checkpoint of the run after `step` steps; with checkpoint.asynchronous, goes on when the state is
        copied. Call it between steps. Raises OutputError when this one, or the one before, cannot be written."""
        self.finish()
        if self._saved == step:
            return
        self._meet(step)
        state = state_of(self._stepper.engine)
        shards, manifest = kept_by(self._stepper.engine, state), self._manifest(step, state)
        if self._recipe.asynchronous:
            shards = self._copied(shards)
            self._pending = threading.Thread(target=self._write_behind, args=(shards, manifest), daemon=True)
            self._pending.start()
        else:
            self._write(shards, manifest)
        self._saved, self._last = step, time.monotonic()

    def finish(self) -> None:
        """Waits for what is being written. Raises OutputError when it could not be."""
        if self._pending is not None:
            self._pending.join()
            self._pending = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Lets what is being written end, whatever comes of it: the run has ended in another way."""
        if self._pending is not None:
            self._pending.join(self._timeout.total_seconds())

    def resume(self, folder: Path, *, allow_changes: bool) -> Manifest:
        """Takes up the run that the checkpoint `folder` holds. Raises CheckpointError, before anything is changed, when
        it is damaged or of another run; `allow_changes` lets the recipe differ where the state still fits."""
        manifest = read_manifest(folder)
        self._check(folder, manifest, allow_changes=allow_changes)
        found = gather_objects(
            damages(folder, manifest, part=self._world.rank, parts=self._world.size), self._world, self._group
        )
        if broken := sorted(sentence for part in found for sentence in part):
            raise CheckpointError(
                f"is damaged: {broken[0]}",
                where=str(folder),
                remedy="Give another checkpoint with --resume-from, and another --out.",
            )
        stepper = self._stepper
        stepper.engine.prepare(optimizer_keys(list(manifest.tensors)), manifest.updates)
        read_tensors(folder, state_of(stepper.engine))
        stepper.engine.refresh()
        if stepper.scale and manifest.loss_scale:
            stepper.scale.restore(manifest.loss_scale)
        stepper.monitor.restore(manifest.moved)
        self._saved = manifest.step if folder.parent == self._folder else None
        return manifest

    def _manifest(self, step: int, state: list[Shard]) -> Manifest:
        recipe, stepper = self._course.recipe, self._stepper
        return Manifest(
            step=step,
            updates=stepper.engine.updates,
            engine=recipe.engine.name,
            ranks=recipe.engine.ranks,
            regime=recipe.precision.regime,
            rows_per_step=self._course.loader.rows_per_step,
            data_sha256=self._course.loader.examples.sha256,
            loss_scale=stepper.scale.state() if stepper.scale else None,
            moved=stepper.monitor.moved,
            tensors=stored(state),
            recipe=recipe.model_dump(mode="json"),
            plan=described(self._course.plan),
            versions=versions(),
            frozen_sha256=self._course.frozen_sha256,
        )

    def _copied(self, shards: list[Shard]) -> list[Shard]:
        """The shards with copies in host memory, whose places are kept for the next time: to have the system find new
        ones takes longer than to fill them."""
        values = [shard.values.detach() for shard in shards]
        if [(v.dtype, v.shape) for v in values] != [(c.dtype, c.shape) for c in self._copies]:
            self._copies = [torch.empty_like(v, device="cpu") for v in values]
        for copy, live in zip(self._copies, values, strict=True):
            copy.copy_(live)
        return [replace(shard, values=copy) for copy, shard in zip(self._copies, shards, strict=True)]

    def _meet(self, step: int) -> None:
        """Has all ranks arrive before anything is written. Raises RunError that names those who do not."""
        if self._world.size == 1:
            return
        try:
            dist.monitored_barrier(self._group, timeout=self._timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise RunError(
                f"not all ranks came to save step {step}: {str(error).splitlines()[0]}",
                where=str(self._folder),
                remedy=_WHOLE,
            ) from error

    def _write_behind(self, shards: list[Shard], manifest: Manifest) -> None:
        try:
            self._write(shards, manifest)
        except SamestepError as error:
            self._failure = error
        except Exception as error:  # what the other thread has to say must not be lost with it
            self._failure = RunError(f"the checkpoint of step {manifest.step} failed: {error}")

    def _write(self, shards: list[Shard], manifest: Manifest) -> None:
        partial = self._folder / f".{store.name_of(manifest.step)}.partial"
        main = self._world.is_main
        try:
            self._together(lambda: store.begin(self._folder, manifest.step) if main else None)
            write_tensors(partial, shards, self._group)
            files = self._together(lambda: dict(_own_files(partial, self._world.rank)))
            merged = {name: file for part in files for name, file in part.items()}
            complete = replace(manifest, files=merged)
            self._together(lambda: store.publish(partial, complete, keep=self._recipe.keep) if main else None)
        except OutputError as error:
            if main:
                store.abandon(partial)
            raise OutputError(error.what, where=error.where, remedy=error.remedy or _WHOLE) from error

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        """Does this rank's part; what every rank's part gave. Raises OutputError on all ranks when one failed."""
        result, failure = None, None
        try:
            result = work()
        except (OutputError, OSError) as error:
            failure = str(error)
        everyone = gather_objects((result, failure), self._world, self._group)
        if failed := next((text for _, text in everyone if text), None):
            raise OutputError(failed, remedy=_WHOLE)
        return [value for value, _ in everyone]

    def _check(self, folder: Path, manifest: Manifest, *, allow_changes: bool) -> None:
        """Raises CheckpointError when the checkpoint is not of this run."""
        course = self._course
        wanted = {parameter.name for parameter in course.plan.trainable}
        if strange := sorted(wanted ^ master_names(list(manifest.tensors))):
            raise CheckpointError(
                f"trains other parameters than the recipe; {strange[0]} is only in one of the two",
                where=str(folder),
                remedy="Give the model, the freezing and the adapters that it was made with.",
            )
        frozen = gather_objects(course.frozen_sha256, self._world, self._group)[0]
        if not allow_changes:
            refuse_others(frozen, manifest.frozen_sha256, str(folder))
        changes = list(_changes(manifest.recipe, course.recipe.model_dump(mode="json")))
        if manifest.data_sha256 != course.loader.examples.sha256:
            changes.append("the rows of the training data are others")
        rows = course.loader.rows_per_step
        if manifest.rows_per_step != rows:
            changes.append(
                f"a step takes {rows} rows (ranks x micro_batch x accumulation), not {manifest.rows_per_step}"
            )
        if changes and not allow_changes:
            raise CheckpointError(
                f"is of another run than the recipe: {'; '.join(changes[:4])}",
                where=str(folder),
                remedy="Mend the recipe, or give --allow-changes to go on all the same.",
            )


def falls_on(step: int, every: int | None) -> bool:
    """Whether something that is done every so many steps, or never for None, is due after this one."""
    return every is not None and step % every == 0


def _own_files(folder: Path, rank: int) -> Iterator[tuple[str, StoredFile]]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith(f"__{rank}_") or (rank == 0 and path.name == METADATA):
            yield path.name, stored_file(path)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Fields of two recipes that differ and may not."""
    for name, value in now.items():
        path = f"{prefix}{name}"
        old = before.get(name, value)
        if isinstance(value, dict) and isinstance(old, dict) and path != "model.config":
            yield from _changes(old, value, f"{path}.")
        elif old != value and not path.startswith(_FREE):
            yield f"{path} was {old}, now it is {value}"
