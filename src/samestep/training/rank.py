"""What one rank does from the first line to the last."""

from __future__ import annotations

import math
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

import samestep
from samestep import models, world
from samestep.checkpoint.export import gather_weights, write_export
from samestep.data import Loader, Prepared, prepare
from samestep.dtypes import dtype_name
from samestep.engines import build
from samestep.errors import ModelError, RunError, VerificationError
from samestep.optim import lr_at
from samestep.precision import lost_updates
from samestep.precision.facts import Facts, Violation, violations
from samestep.precision.plan import described
from samestep.recipe import resolved_text
from samestep.recipe.schema import Recipe
from samestep.training import folder
from samestep.training.display import Display, upcast_sentence
from samestep.training.steps import StepOutcome, Stepper
from samestep.training.trackers import open_trackers
from samestep.world import World, gather_numbers


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a rank is asked to do. `keep_masters` also leaves the masters themselves in the run folder."""

    recipe: Recipe
    out: Path
    keep_masters: bool = False


def run(request: Request) -> dict[str, Any] | None:
    """Does this process's part of a run. Returns the summary on the main rank, None on the others.

    The run folder must exist and be empty. Raises SamestepError; the other ranks then raise or are ended by the launcher.
    """
    torch.set_num_threads(request.recipe.engine.threads)
    here = world.start(timeout_seconds=request.recipe.engine.timeout_seconds)
    with _stop_requests() as stop_requested:
        run = _Run(request, here)
        try:
            return run.go(stop_requested)
        finally:
            run.close()


class _Run:
    """One run on one rank. The steps of `go` in order are the run."""

    def __init__(self, request: Request, here: World) -> None:
        recipe = request.recipe
        self.out, self.world, self.keep_masters = request.out, here, request.keep_masters
        self.started = time.time()
        self.tokenizer = models.load_tokenizer(recipe.model)
        self.data = prepare(recipe.data, self.tokenizer, seed=recipe.train.seed)
        self.loader = _loader(self.data, recipe, self.tokenizer)
        self.held_out = _evaluation_loader(self.data, recipe, self.tokenizer)
        self.total_steps = _total_steps(recipe, self.loader)
        model = models.load_model(recipe.model, seed=recipe.train.seed)
        _check_vocabulary(model, self.data)
        self.recipe = _resolved(recipe, model, self.total_steps)
        self.plan = build.resolve_plan(self.recipe, model)
        self.engine = build.build(self.recipe, model, self.plan, here)
        self.stepper = Stepper(self.engine, self.recipe, here, compute=self.plan.compute)
        self.display = Display(steps=self.total_steps, every=recipe.log.every, quiet=not here.is_main)
        trackers = recipe.log.trackers if here.is_main else []
        self.trackers = open_trackers(trackers, self.out, recipe.name)
        self.violations: list[Violation] = []
        self.facts: Facts | None = None
        self.first: folder.StepRecord | None = None
        self.last: folder.StepRecord | None = None
        self.evaluations: list[dict[str, Any]] = []

    def go(self, stop_requested: Callable[[], bool]) -> dict[str, Any] | None:
        self._write_plan()
        self._guard()
        self._evaluate(0)
        steps = folder.JsonLines(self.out / "steps.jsonl") if self.world.is_main else None
        status = "completed"
        try:
            for index in range(self.total_steps):
                outcome, record = self._step(index, stop_requested())
                if steps:
                    steps.write(record)
                self._show(record)
                self._judge(outcome, record)
                if record.step == self.total_steps or self._evaluates_at(record.step):
                    self._evaluate(record.step)
                if outcome.should_stop and record.step < self.total_steps:
                    status = "interrupted"
                    break
        finally:
            if steps:
                steps.close()
        return self._finish(status)

    def _write_plan(self) -> None:
        """Leaves the resolved recipe, the plan and the data report; prints the precision table."""
        if not self.world.is_main:
            return
        folder.write_text(self.out / "recipe.yaml", resolved_text(self.recipe))
        held_out = self.data.held_out_report
        folder.write_json(
            self.out / "data.json",
            {"train": asdict(self.data.train_report), "held_out": asdict(held_out) if held_out else None},
        )
        self._write_precision()
        engine = self.recipe.engine
        self.display.plan(self.plan, engine=engine.name, ranks=engine.ranks, shared_by=self._shared_by)
        report = self.data.train_report
        dropped = report.dropped_too_long + report.dropped_empty + report.dropped_without_labels
        self.display.say(
            f"{report.kept:,} of {report.rows_read:,} rows ({report.truncated} truncated, {dropped} dropped), "
            f"{report.label_tokens:,} label tokens, {self.total_steps} steps."
        )

    @property
    def _shared_by(self) -> int:
        """Ranks that share one copy of the masters."""
        return self.world.size // self.engine.replica.count

    def _write_precision(self) -> None:
        plan = described(self.plan)
        plan["parameters"]["upcast_bytes_per_rank"] = self.plan.upcast_bytes // self._shared_by
        facts = (
            {role: [dtype_name(d) for d in dtypes] for role, dtypes in self.facts.roles.items()} if self.facts else None
        )
        content = {
            "plan": plan,
            "facts": facts,
            "violations": [{"role": v.role, "what": str(v)} for v in self.violations],
            "upcast": upcast_sentence(self.plan, shared_by=self._shared_by),
        }
        folder.write_json(self.out / "precision.json", content)

    def _guard(self) -> None:
        """Refuses a run whose updates would mostly be lost, before its first step."""
        limit = self.recipe.precision.max_lost_update_share
        optimizer = self.recipe.train.optimizer
        if limit is None or optimizer.name != "adamw":
            return
        peak = max(self._lr(step) for step in range(1, self.total_steps + 1))
        lost = looked_at = 0
        for shard in self.engine.masters():
            numel = torch.Size(shard.shape).numel()
            counts = lost_updates.forecast_lost(lost_updates.sample(shard.values, start=shard.start, numel=numel), peak)
            lost, looked_at = lost + counts[0], looked_at + counts[1]
        rows = gather_numbers([lost, looked_at], self.world)
        share = sum(row[0] for row in rows) / max(1, sum(row[1] for row in rows))
        if share > limit:
            raise RunError(
                f"at the highest learning rate, {peak:g}, {share:.0%} of the updates would be lost: "
                f"{dtype_name(self.plan.master)} weights cannot move by so little (the limit is {limit:.0%})",
                where="precision.regime",
                remedy="Use precision.regime: mixed, or precision.max_lost_update_share: null to run all the same.",
            )

    def _lr(self, step: int) -> float:
        train = self.recipe.train
        return lr_at(step, lr=train.optimizer.lr, schedule=train.schedule, total_steps=self.total_steps)

    def _evaluates_at(self, step: int) -> bool:
        every = self.recipe.train.evaluate_every
        return every is not None and step % every == 0

    def _evaluate(self, step: int) -> None:
        if self.held_out is None:
            return
        loss = self.stepper.evaluate(self.held_out)
        record = {"step": step, "loss": folder.finite(loss), "rows": len(self.held_out.examples)}
        self.evaluations.append(record)
        if self.world.is_main:
            lines = folder.JsonLines(self.out / "evaluations.jsonl")
            lines.write(record)
            lines.close()
            self.display.say(f"held-out loss after {step} steps: {loss:.4f}")
            for tracker in self.trackers:
                tracker.log(step, {"held_out_loss": loss})

    def _step(self, index: int, stop: bool) -> tuple[StepOutcome, folder.StepRecord]:
        step = index + 1
        data = self.loader.step(index)
        lr = self._lr(step)
        scale = self.stepper.scale.value if self.stepper.scale else None
        began = time.perf_counter()
        outcome = self.stepper.step(
            data,
            index=index,
            lr=lr,
            measure=index % self.recipe.precision.measure_every == 0,
            stop=stop,
            facts=self.facts is None,
        )
        if self.world.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - began
        self._verify(outcome)
        record = folder.StepRecord(
            step=step,
            epoch=data.epoch,
            loss=folder.finite(outcome.loss),
            grad_norm=folder.finite(outcome.grad_norm),
            grad_norm_clipped=folder.finite(outcome.grad_norm_clipped),
            lr=lr,
            label_tokens=data.label_tokens,
            tokens=data.tokens,
            step_seconds=seconds,
            tokens_per_second_per_device=data.tokens / seconds / self.world.size,
            mfu=None,
            peak_memory_bytes=_peak_memory(self.world.device),
            lost_update_share=outcome.lost_update_share,
            unseen_update_share=outcome.unseen_update_share,
            loss_scale=scale,
            skipped=outcome.skipped,
        )
        self.first = self.first or record
        self.last = record
        return outcome, record

    def _verify(self, outcome: StepOutcome) -> None:
        """Compares what the first update showed with the plan, once; a violation ends the run."""
        if outcome.facts is None:
            return
        self.facts = outcome.facts
        self.violations = violations(self.plan, outcome.facts, several_ranks=self.world.size > 1)
        if self.world.is_main:
            self._write_precision()
        if self.violations:
            raise VerificationError(
                "the run breaks its precision plan: " + "; ".join(map(str, self.violations)),
                remedy="Report this as a bug; precision.json has the details.",
            )

    def _show(self, record: folder.StepRecord) -> None:
        self.display.step(record)
        if record.step % self.recipe.log.every == 0:
            scalars = {k: v for k, v in asdict(record).items() if isinstance(v, float)}
            for tracker in self.trackers:
                tracker.log(record.step, scalars)

    def _judge(self, outcome: StepOutcome, record: folder.StepRecord) -> None:
        """What a non-finite step means: a smaller loss scale, the end of the run, or a skipped update."""
        scale = self.stepper.scale
        if not outcome.skipped:
            if scale:
                scale.went_well()
            return
        if scale and scale.can_shrink and math.isfinite(outcome.loss):
            scale.overflowed()
            return
        if self.recipe.train.on_non_finite == "stop":
            what = "gradient" if math.isfinite(outcome.loss) else "loss"
            raise RunError(
                f"the {what} of step {record.step} is not finite; the weights are those of the step before",
                where=str(self.out / "steps.jsonl"),
                remedy="Lower the learning rate, or set train.on_non_finite: skip.",
            )

    def _finish(self, status: str) -> dict[str, Any] | None:
        """Exports and sums up."""
        self.display.close()
        model = None
        if self.world.is_main and self.recipe.train.export:
            model = models.load_model(self.recipe.model, seed=self.recipe.train.seed)
        into = {name: p.data for name, p in model.named_parameters()} if model is not None else {}
        masters = self.out / "masters.safetensors" if self.keep_masters else None
        digest = gather_weights(self.engine, self.world, into=into, masters=masters)
        if not self.world.is_main:
            return None
        if model is not None:
            dtype = self.recipe.precision.export_dtype
            folder.write_folder(
                self.out / "export", lambda path: write_export(model, self.tokenizer, path, dtype=dtype)
            )
        summary = self._summary(status, digest)
        folder.write_json(self.out / "summary.json", summary)
        done = "done" if status == "completed" else "stopped as asked"
        self.display.say(f"{done} after {summary['steps']} steps: {self.out}")
        return summary

    def _summary(self, status: str, digest: str | None) -> dict[str, Any]:
        return {
            "name": self.recipe.name,
            "status": status,
            "engine": self.recipe.engine.name,
            "regime": self.recipe.precision.regime,
            "ranks": self.recipe.engine.ranks,
            "steps": self.last.step if self.last else 0,
            "planned_steps": self.total_steps,
            "first_loss": self.first.loss if self.first else None,
            "last_loss": self.last.loss if self.last else None,
            "evaluations": self.evaluations,
            "weights_sha256": digest,
            "run": str(self.out),
            "seconds": time.time() - self.started,
            "versions": _versions(),
            "machine": {"system": platform.platform(), "device": self.world.device.type},
        }

    def close(self) -> None:
        self.display.close()
        for tracker in self.trackers:
            tracker.close()
        self.engine.close()


def _loader(data: Prepared, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Loader:
    return Loader(
        data.train,
        ranks=recipe.engine.ranks,
        micro_batch=recipe.train.micro_batch,
        accumulation=recipe.train.accumulation,
        seed=recipe.train.seed,
        shuffle=recipe.data.shuffle,
        drop_last=recipe.data.drop_last,
        pad_id=tokenizer.pad_token_id or 0,
    )


def _evaluation_loader(data: Prepared, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Loader | None:
    if data.held_out is None:
        return None
    return Loader(
        data.held_out,
        ranks=recipe.engine.ranks,
        micro_batch=recipe.train.micro_batch,
        accumulation=1,
        seed=0,
        shuffle=False,
        drop_last=False,
        pad_id=tokenizer.pad_token_id or 0,
        idle_ranks=True,
    )


def _total_steps(recipe: Recipe, loader: Loader) -> int:
    if recipe.train.steps is not None:
        return recipe.train.steps
    assert recipe.train.epochs is not None
    return max(1, math.ceil(recipe.train.epochs * loader.steps_per_epoch))


def _check_vocabulary(model: torch.nn.Module, data: Prepared) -> None:
    largest = max(part.largest_token_id for part in (data.train, data.held_out) if part is not None)
    size = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if largest >= size:
        raise ModelError(
            f"the tokenizer makes token {largest}, but the model's vocabulary has {size}",
            where="model.tokenizer",
            remedy="Use the tokenizer that belongs to the model.",
        )


def _resolved(recipe: Recipe, model: torch.nn.Module, total_steps: int) -> Recipe:
    """The recipe with what was only known now: steps, shard units and group sizes."""
    engine = recipe.engine
    units = sorted({type(m).__name__ for m in models.unit_modules(model, engine.unit_classes)})
    changes: dict[str, Any] = {"unit_classes": units or None}
    if engine.name == "hsdp" and engine.shard_ranks is None:
        changes["shard_ranks"] = max(1, engine.ranks // 2)
    return recipe.model_copy(
        update={
            "engine": engine.model_copy(update=changes),
            "train": recipe.train.model_copy(update={"steps": total_steps, "epochs": None}),
        }
    )


def _peak_memory(device: torch.device) -> int:
    """Largest memory so far: allocated on an accelerator, resident on the CPU. Bytes."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated())
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _versions() -> dict[str, str]:
    versions = {"samestep": samestep.__version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "deepspeed", "peft"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


@contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """Turns SIGINT and SIGTERM into a question that can be asked between steps. A second one ends at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def handle(_number: int, _frame: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
