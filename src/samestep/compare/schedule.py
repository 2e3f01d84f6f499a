"""Runs variants one after the other, or side by side on sets of devices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from samestep.compare import kept
from samestep.compare.child import Child
from samestep.compare.outcome import Outcome, read_outcome
from samestep.compare.progress import VariantProgress
from samestep.compare.variants import Variant
from samestep.console import say
from samestep.errors import EngineError, RunError, SamestepError
from samestep.recipe import Recipe
from samestep.training import folder
from samestep.training.signals import as_interrupt

_POLL_SECONDS = 0.2


def refuse_device_sets(device_sets: Sequence[str], checked: Sequence[Recipe]) -> None:
    """EngineError for a set that names a device that is not there or in another set too, or that is too small."""
    if not device_sets:
        return
    # A comparison without them needs no torch in this process.
    import torch

    there = torch.accelerator.device_count()
    seen: set[str] = set()
    needed = max(1 if recipe.engine.name == "single" else recipe.engine.ranks for recipe in checked)
    for text in device_sets:
        devices = text.split(",")
        for device in devices:
            if not (device.isascii() and device.isdigit() and int(device) < there):
                raise EngineError(
                    f"{device!r} is no device of this machine, which has {there}",
                    where=f"--devices {text}",
                    remedy="Number them from 0, as in --devices 0,1 --devices 2,3; or leave --devices out.",
                )
            if device in seen:
                raise EngineError(
                    f"device {device} is given twice", where=f"--devices {text}", remedy="Give every device once."
                )
            seen.add(device)
        if len(devices) < needed:
            raise EngineError(
                f"{len(devices)} devices are too few for {needed} ranks",
                where=f"--devices {text}",
                remedy="Give every set as many devices as a variant has ranks.",
            )


@dataclass(frozen=True, kw_only=True)
class _Running:
    """A variant that runs now. Leaving `context` ends its process."""

    number: int
    variant: Variant
    run: Path
    devices: str | None
    child: Child
    progress: VariantProgress
    context: ExitStack

    def looked(self, seconds: float) -> bool:
        """Waits so long, shows what was done, and says whether the run has ended."""
        ended = self.child.ended(seconds)
        self.progress.look()
        return ended

    def outcome(self) -> Outcome:
        """What the ended run left. Raises SamestepError when it failed or did not come to its end."""
        with self.context:
            if failure := self.child.failure():
                failed = SamestepError(str(failure), where=f"variant {self.variant.name}")
                failed.exit_code = failure.exit_code
                raise failed
            outcome = read_outcome(self.variant, self.run)
            if outcome.summary["status"] != "completed":
                raise RunError(
                    f"the run was {outcome.summary['status']} after {len(outcome.steps)} steps; there is nothing to "
                    "compare.",
                    where=f"variant {self.variant.name}",
                    remedy="Go on with --resume.",
                )
            self.progress.done(outcome.last_loss)
        return outcome


def run_all(
    variants: Sequence[Variant],
    checked: Sequence[Recipe],
    states: Sequence[kept.State],
    out: Path,
    device_sets: Sequence[str] = (),
) -> list[Outcome]:
    """Runs what is not there yet and gives all outcomes, in the order of the variants.

    Without `device_sets` one runs at a time, on all devices. When one fails, those beside it are ended. Raises
    SamestepError, or KeyboardInterrupt when asked to end.
    """
    console = Console(stderr=True)
    outcomes: dict[int, Outcome] = {}
    waiting: list[int] = []
    for number, (each, state) in enumerate(zip(variants, states, strict=True)):
        if state == "whole":
            title = f"variant {number + 1} of {len(variants)}  {each.name}"
            say(console, f"{title}  is already done")
            outcomes[number] = read_outcome(each, out / each.name)
        else:
            waiting.append(number)
    free: list[str | None] = list(device_sets) or [None]
    # Two bars cannot be drawn at a time.
    bar = console.is_terminal and len(free) == 1
    running: list[_Running] = []
    with as_interrupt(), ExitStack() as stopped_early:
        stopped_early.callback(lambda: [each.context.close() for each in running])
        while waiting or running:
            while waiting and free:
                number = waiting.pop(0)
                each = variants[number]
                progress = VariantProgress(
                    console, name=each.name, number=number + 1, variants=len(variants), run=out / each.name, bar=bar
                )
                running.append(_start(number, each, checked[number], states[number], free.pop(0), progress, out))
            for each in list(running):
                if each.looked(_POLL_SECONDS / len(running)):
                    running.remove(each)
                    outcomes[each.number] = each.outcome()
                    free.append(each.devices)
    return [outcomes[number] for number in range(len(variants))]


def _start(
    number: int,
    each: Variant,
    recipe: Recipe,
    state: kept.State,
    devices: str | None,
    progress: VariantProgress,
    out: Path,
) -> _Running:
    run = out / each.name
    goes_on = state == "checkpoint"
    if not goes_on:
        # Before the log: so every log has a run folder beside it, by which --overwrite knows it.
        folder.prepare(run, overwrite=state == "broken")
    log = run.with_name(f"{run.name}.log")
    with ExitStack() as context:
        context.enter_context(progress)
        child = context.enter_context(Child(recipe, run, log, resume=goes_on, devices=devices))
        return _Running(
            number=number,
            variant=each,
            run=run,
            devices=devices,
            child=child,
            progress=progress,
            context=context.pop_all(),
        )
