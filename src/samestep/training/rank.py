"""What one rank does from the first line to the last."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from samestep import models, world
from samestep.checkpoint.frozen import frozen_sha256
from samestep.data import GlobalStep, prepare
from samestep.engines import build, loading
from samestep.errors import CheckpointError, RunError, VerificationError
from samestep.precision.facts import Facts, Violation, violations
from samestep.precision.forecast import Forecast
from samestep.precision.plan import Plan
from samestep.recipe import resolved_text
from samestep.recipe.schema import Recipe
from samestep.training import folder, machine, report, setup
from samestep.training.checkpoints import Checkpoints, Course, falls_on
from samestep.training.display import Display
from samestep.training.evaluations import Evaluations
from samestep.training.exporting import Trained, export, exported_losses
from samestep.training.guard import refuse_run
from samestep.training.monitor import Shares
from samestep.training.outlook import described, learning_rates, outlook, sentences
from samestep.training.request import Request
from samestep.training.signals import stop_requests
from samestep.training.steps import StepOutcome, Stepper
from samestep.training.trackers import open_trackers
from samestep.world import World


def run(request: Request) -> dict[str, Any] | None:
    """Does this process's part of a run. Returns the summary on the main rank, None on the others.

    The run folder must exist, and be empty unless it is the one to go on in. Raises SamestepError; the launcher then
    ends the other ranks.
    """
    torch.set_num_threads(request.recipe.engine.threads)
    here = world.start(timeout_seconds=request.recipe.engine.timeout_seconds)
    with stop_requests() as stop_requested:
        run = _Run(request, here)
        try:
            return run.go(stop_requested)
        finally:
            run.close()


class _Run:
    """One run on one rank. The steps of `go` in order are the run."""

    def __init__(self, request: Request, here: World) -> None:
        recipe = request.recipe
        self.request, self.out, self.world = request, request.out, here
        self.started = time.time()
        models.check_config(recipe.model)
        self.tokenizer = models.load_tokenizer(recipe.model)
        self.data = prepare(recipe.data, self.tokenizer, seed=recipe.train.seed)
        self.loader = setup.training_loader(self.data, recipe, self.tokenizer)
        self.total_steps = setup.total_steps(recipe, self.loader)
        model = loading.load_model(recipe, here)
        setup.check_embeddings(model, self.data)
        self.recipe = setup.resolved(recipe, model, self.total_steps)
        self.plan = build.resolve_plan(self.recipe, model)
        self.unused = models.unused_weights(model)
        # Few, and at the end nobody could say any more what they were.
        self.adapters = models.adapters(model) if here.is_main and recipe.model.lora else {}
        self.rates = learning_rates(self.recipe, self.total_steps)
        looks_ahead = here.is_main and request.resume is None
        self.outlook = outlook(self.recipe, self.plan, model, self.rates) if looks_ahead else None
        earlier = report.earlier_forecast(self.out / "precision.json") if here.is_main and request.resume else None
        self.forecast = described(self.outlook) if self.outlook else earlier
        frozen = frozen_sha256(model) if here.is_main else None
        self.engine = build.build(self.recipe, model, self.plan, here)
        self.stepper = Stepper(self.engine, self.recipe, here, self.plan)
        course = Course(recipe=self.recipe, plan=self.plan, loader=self.loader, frozen_sha256=frozen)
        self.checkpoints = Checkpoints(course, self.stepper, self.out, here)
        self.display = Display(steps=self.total_steps, every=recipe.log.every, quiet=not here.is_main)
        trackers = recipe.log.trackers if here.is_main else []
        self.trackers = open_trackers(trackers, self.out, recipe.name)
        self.violations: list[Violation] = []
        self.facts: Facts | None = None
        self.first: folder.StepRecord | None = None
        self.last: folder.StepRecord | None = None
        self.shares: Shares | None = None
        held_out = setup.evaluation_loader(self.data, recipe, self.tokenizer)
        self.evaluations = Evaluations(held_out, self.stepper, self.out, here, self.display, self.trackers)

    def go(self, stop_requested: Callable[[], bool]) -> dict[str, Any] | None:
        done = self._take_up()
        self._write_plan()
        if not done:
            self.evaluations.add(0)
        steps = folder.JsonLines(self.out / "steps.jsonl") if self.world.is_main else None
        status = "completed"
        try:
            for index in range(done, self.total_steps):
                outcome, record = self._step(index, stop_requested())
                if steps:
                    steps.write(record)
                self._show(record)
                _judge(self.stepper, self.recipe, outcome, record.step, self.out)
                last = record.step == self.total_steps
                if last or falls_on(record.step, self.recipe.train.evaluate_every):
                    self.evaluations.add(record.step)
                if not last and (outcome.should_stop or record.step == self.request.stop_after):
                    status = "interrupted" if outcome.should_stop else "stopped"
                ends = status != "completed"
                if (
                    ends
                    or outcome.should_save
                    or self.checkpoints.due(record.step)
                    or (last and self.checkpoints.wanted)
                ):
                    self.checkpoints.save(record.step)
                if ends:
                    break
            self.checkpoints.finish()
        finally:
            if steps:
                steps.close()
        return self._finish(status)

    def _take_up(self) -> int:
        """Starts the run, or goes on with one. Returns the number of steps that are done."""
        request = self.request
        if request.resume is None:
            refuse_run(self.recipe, self.plan, self.engine.masters, self.rates, self.world)
            return 0
        manifest = self.checkpoints.resume(request.resume, allow_changes=request.allow_changes)
        if manifest.step >= self.total_steps:
            raise CheckpointError(
                f"is of step {manifest.step}, and the run has {self.total_steps}: nothing is left to do",
                where=str(request.resume),
                remedy="To train on, raise train.steps and give --allow-changes.",
            )
        if self.world.is_main:
            self.first = folder.keep_steps(self.out / "steps.jsonl", manifest.step)
        self.evaluations.restore(manifest.step)
        self.display.say(
            f"goes on after step {manifest.step}, saved by {manifest.engine} on {manifest.ranks} "
            f"{'rank' if manifest.ranks == 1 else 'ranks'}: {request.resume}"
        )
        return manifest.step

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
        self.display.plan(self.plan, engine=engine.name, ranks=engine.ranks)
        self.display.say(report.upcast_sentence(self.plan, shared_by=self._shared_by))
        for sentence in _notes(self.plan, self.unused, self.outlook):
            self.display.say(sentence)
        self.display.say(report.rows_sentence(self.data.train_report, self.total_steps))

    @property
    def _shared_by(self) -> int:
        """Ranks that share one copy of the masters."""
        return self.world.size // self.engine.replica.count

    def _write_precision(self) -> None:
        if self.world.is_main:
            report.write_precision(
                self.out / "precision.json",
                self.plan,
                shared_by=self._shared_by,
                forecast=self.forecast,
                facts=self.facts,
                violations=self.violations,
            )

    def _step(self, index: int, stop: bool) -> tuple[StepOutcome, folder.StepRecord]:
        step = index + 1
        data = self.loader.step(index)
        lr = self.rates[index]
        scale = self.stepper.scale.value if self.stepper.scale else None
        began = time.perf_counter()
        outcome = self.stepper.step(
            data,
            index=index,
            lr=lr,
            measure=index % self.recipe.precision.measure_every == 0,
            facts=self.facts is None,
            stop=stop,
            save=self.world.is_main and self.checkpoints.overdue(),
        )
        if self.world.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - began
        self._verify(outcome)
        record = _record(outcome, data, step=step, lr=lr, loss_scale=scale, seconds=seconds, here=self.world)
        self.shares = outcome.shares or self.shares
        self.first = self.first or record
        self.last = record
        return outcome, record

    def _verify(self, outcome: StepOutcome) -> None:
        """Compares what the first update showed with the plan, once; a violation ends the run."""
        if outcome.facts is None:
            return
        self.facts = outcome.facts
        self.violations = violations(self.plan, outcome.facts, several_ranks=self.world.size > 1)
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

    def _finish(self, status: str) -> dict[str, Any] | None:
        """Exports and sums up."""
        self.display.close()
        trained = Trained(
            recipe=self.recipe,
            plan=self.plan,
            engine=self.engine,
            world=self.world,
            steps=self.last.step if self.last else 0,
            out=self.out,
            adapters=self.adapters,
        )
        digest, dropped = export(trained, self.tokenizer, keep_masters=self.request.keep_masters)
        losses: dict[str, Any] = {}
        if self.evaluations.made and status == "completed":
            losses = exported_losses(trained, self.evaluations.made[-1]["loss"], self.evaluations.measure)
        if not self.world.is_main:
            return None
        exported = dropped.described() | losses if dropped else None
        summary = report.summary(
            self.recipe,
            status=status,
            first=self.first,
            last=self.last,
            evaluations=self.evaluations.made,
            shares=self.shares,
            export=exported,
            weights_sha256=digest,
            out=self.out,
            seconds=time.time() - self.started,
            device=self.world.device,
        )
        folder.write_json(self.out / "summary.json", summary)
        for sentence in report.vanished_sentences(self.recipe, self.plan, self.shares, exported):
            self.display.say(sentence)
        self.display.ended(status, steps=summary["steps"], out=self.out)
        return summary

    def close(self) -> None:
        self.checkpoints.close()
        self.display.close()
        for tracker in self.trackers:
            tracker.close()
        self.engine.close()


def _judge(stepper: Stepper, recipe: Recipe, outcome: StepOutcome, step: int, out: Path) -> None:
    """Ends the run at a step whose numbers are not finite, unless the recipe, or a loss scale, skips it."""
    tolerated = stepper.settle(outcome)
    if not tolerated and recipe.train.on_non_finite == "stop":
        what = "gradient" if math.isfinite(outcome.loss) else "loss"
        raise RunError(
            f"the {what} of step {step} is not finite; the weights are those of the step before",
            where=str(out / "steps.jsonl"),
            remedy="Lower the learning rate, or set train.on_non_finite: skip.",
        )


def _notes(plan: Plan, unused: tuple[str, ...], found: Forecast | None) -> list[str]:
    """What is worth saying about this model before the run."""
    notes = [float8] if (float8 := report.float8_sentence(plan)) else []
    if unused:
        notes.append(f"The model has no place for {len(unused)} stored weights: {unused[0]} first.")
    return notes + (sentences(found) if found else [])


def _record(
    outcome: StepOutcome,
    data: GlobalStep,
    *,
    step: int,
    lr: float,
    loss_scale: float | None,
    seconds: float,
    here: World,
) -> folder.StepRecord:
    shares = outcome.shares
    return folder.StepRecord(
        step=step,
        epoch=data.epoch,
        loss=folder.finite(outcome.loss),
        grad_norm=folder.finite(outcome.grad_norm),
        grad_norm_clipped=folder.finite(outcome.grad_norm_clipped),
        lr=lr,
        label_tokens=data.label_tokens,
        tokens=data.tokens,
        step_seconds=seconds,
        tokens_per_second_per_device=data.tokens / seconds / here.size,
        mfu=None,
        peak_memory_bytes=machine.peak_memory(here.device),
        lost_update_share=shares.lost if shares else None,
        unseen_update_share=shares.unseen if shares else None,
        lost_update_length=shares.lost_length if shares else None,
        unseen_update_length=shares.unseen_length if shares else None,
        tensors_never_moved=len(shares.never_moved) if shares else None,
        loss_scale=loss_scale,
        skipped=outcome.skipped,
    )
