"""From what the rounds measured to bench.json."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from samestep import models
from samestep.bench import flops
from samestep.bench.contenders import PEERS, Contender, Peer
from samestep.bench.devices import find_device
from samestep.bench.flops import Decoder
from samestep.bench.order import PARTS, Measured
from samestep.bench.statistics import Ratio, Spread
from samestep.dtypes import dtype_name
from samestep.errors import ModelError
from samestep.precision.plan import Plan

_FUSED = "accelerate updates the weights inside of backward: backward and optimizer are one, under backward."
_ROUNDED = (
    "DeepSpeed makes its fp32 masters from weights that it has cast to bfloat16: its own loops start from rounded ones."
)
_UNSEEN = "torch's profiler saw no collective."
_DEEPSPEED = [peer.name for peer in PEERS.values() if peer.engine == "zero3"]
_ON_CPU = "On the CPU memory is what is resident, libraries included."


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a benchmark was run: rounds, and in each of them untimed, timed and taken-apart steps."""

    rounds: int
    warmup: int
    steps: int
    split: int


Rounds = Mapping[str, Sequence[Measured]]


def make_report(
    name: str, found: Sequence[Contender], missing: Sequence[Peer], plan: Plan, settings: Settings, rounds: Rounds
) -> dict[str, Any]:
    """The content of bench.json. `rounds` are those of each contender, by its name."""
    device = rounds[found[0].name][0].device
    decoder, why = _decoder(found[0])
    peak = _peak(device, plan)
    checkpointing = found[0].recipe.train.activation_checkpointing
    rows = [_row(each, rounds[each.name], decoder, peak) for each in found]
    reference = rounds[found[0].name][0].losses
    for row, each in zip(rows, found, strict=True):
        row["losses"] = _against(reference, rounds[each.name])
    ours = [row for row, each in zip(rows, found, strict=True) if each.peer is None]
    footnotes = _footnotes(rows, device, why)
    absent = [{"engine": peer.name, "title": peer.title, "status": "not installed"} for peer in missing]
    return {
        "name": name,
        "settings": asdict(settings),
        "equal": _equal(found[0], plan),
        "device": {"name": device, "peak_flops": peak, "source": _source(device)},
        "flops_per_token": _flops_per_token(decoder, rounds[found[0].name][0].rows, checkpointing=checkpointing),
        "rows": rows,
        "not_installed": absent,
        "ratios": _ratios(found, rounds),
        "footnotes": footnotes,
        "ok": device != "cpu" or all(row["losses"]["bit_equal"] for row in ours),
    }


def _row(each: Contender, rounds: Sequence[Measured], decoder: Decoder | None, peak: float | None) -> dict[str, Any]:
    """One contender's row. Numbers of steps are medians over all timed steps of all rounds."""
    lengths = [rows for measured in rounds for rows in measured.rows]
    seconds = [s for measured in rounds for s in measured.step_seconds]
    labels = [n for measured in rounds for n in measured.label_tokens]
    rate = Spread.of([sum(rows) / s / each.processes for rows, s in zip(lengths, seconds, strict=True)])
    per_token = _flops_per_token(decoder, rounds[0].rows, checkpointing=each.recipe.train.activation_checkpointing)
    shares = {name: flops.mfu(value, rate.median, peak) for name, value in per_token.items()}
    step = Spread.of(seconds)
    return {
        "engine": each.name,
        "title": each.title,
        "precision": each.recipe.precision.regime,
        "processes": each.processes,
        "tokens_per_second_per_device": rate.median,
        "tokens_per_second_per_device_spread": rate.described(),
        "label_tokens_per_second": Spread.of([n / s for n, s in zip(labels, seconds, strict=True)]).median,
        "step_seconds": step.median,
        "step_seconds_spread": step.described(),
        "step_seconds_by_round": [Spread.of(measured.step_seconds).median for measured in rounds],
        "mfu": shares.get("6N"),
        "mfu_convention": "6N",
        "mfu_with_attention": {"causal": shares.get("causal"), "full": shares.get("full")},
        "hardware_flops_utilization": {"causal": shares.get("hardware")},
        "peak_memory_bytes": max(peak for measured in rounds for peak in measured.peak_memory_bytes),
        "peak_memory_bytes_by_rank": [max(peaks) for peaks in zip(*(m.peak_memory_bytes for m in rounds), strict=True)],
        "split_seconds": _split(rounds),
    }


def _split(rounds: Sequence[Measured]) -> dict[str, float | None] | None:
    """Means over the rounds, so that they add up, of the seconds of a step's parts; None where a part cannot be told
    from another."""
    if not all(measured.parts for measured in rounds):
        return None
    found: dict[str, float | None] = {}
    for name in (*PARTS, "communication", "step"):
        values = [value for measured in rounds if (value := measured.parts.get(name)) is not None]
        found[name] = statistics.fmean(values) if len(values) == len(rounds) else None
    return found


def _flops_per_token(
    decoder: Decoder | None, steps: Sequence[Sequence[int]], *, checkpointing: bool
) -> dict[str, float]:
    """By convention, over the rows of these steps; nothing where the closed forms do not fit the model."""
    if decoder is None:
        return {}
    lengths = [length for rows in steps for length in rows]
    tokens = sum(lengths)
    return {
        "6N": flops.six_n(decoder),
        "causal": flops.model_flops(decoder, lengths, "causal") / tokens,
        "full": flops.model_flops(decoder, lengths, "full") / tokens,
        "hardware": flops.hardware_flops(decoder, lengths, "causal", activation_checkpointing=checkpointing) / tokens,
    }


def _decoder(first: Contender) -> tuple[Decoder | None, str | None]:
    try:
        return Decoder.of(models.load_meta_model(first.recipe.model)), None
    except ModelError as error:
        return None, error.what


def _peak(device: str, plan: Plan) -> float | None:
    known = find_device(device)
    return known.peak_flops.get(dtype_name(plan.compute)) if known else None


def _source(device: str) -> str | None:
    known = find_device(device)
    return known.source if known else None


def _equal(first: Contender, plan: Plan) -> dict[str, Any]:
    """What was checked to be the same for all, and is worth saying."""
    recipe = first.recipe
    return {
        "regime": plan.regime,
        "roles": {name: ", ".join(map(dtype_name, role.dtypes)) or None for name, role in plan.roles.items()},
        "parameters": sum(tensor.numel for tensor in plan.parameters),
        "trainable": sum(tensor.numel for tensor in plan.trainable),
        "ranks": recipe.engine.ranks,
        "threads": recipe.engine.threads,
        "micro_batch": recipe.train.micro_batch,
        "accumulation": recipe.train.accumulation,
        "max_grad_norm": recipe.train.max_grad_norm,
        "activation_checkpointing": recipe.train.activation_checkpointing,
        "optimizer": recipe.train.optimizer.model_dump(mode="json"),
        "attention": recipe.model.attention,
        "seed": recipe.train.seed,
    }


def _against(reference: Sequence[float], rounds: Sequence[Measured]) -> dict[str, Any]:
    """How far the losses of all rounds are from those of the first contender's first round."""
    gaps = [abs(a - b) for measured in rounds for a, b in zip(reference, measured.losses, strict=True)]
    return {"first": rounds[0].losses[0], "bit_equal": max(gaps) == 0.0, "max_abs_gap": max(gaps)}


def _ratios(found: Sequence[Contender], rounds: Rounds) -> dict[str, Any]:
    """Step time of each of ours over that of everyone after it, as A/B: under 1, A is faster."""
    seconds = {name: [measured.step_seconds for measured in of] for name, of in rounds.items()}
    return {
        f"{a.name}/{b.name}": asdict(Ratio.of(seconds[a.name], seconds[b.name]))
        for a, b in itertools.combinations(found, 2)
        if a.peer is None
    }


def _footnotes(rows: Sequence[dict[str, Any]], device: str, unknown_flops: str | None) -> list[str]:
    notes = []
    if unknown_flops:
        notes.append(f"No FLOPs: {unknown_flops}.")
    elif find_device(device) is None:
        notes.append(f"MFU is null: the peak of this device ({device}) is not in the table.")
    if any(row["split_seconds"] and row["split_seconds"]["optimizer"] is None for row in rows):
        notes.append(_FUSED)
    if any(row["split_seconds"] and row["split_seconds"]["communication"] is None for row in rows):
        notes.append(_UNSEEN)
    if any(row["precision"] == "mixed" and row["engine"] in _DEEPSPEED for row in rows):
        notes.append(_ROUNDED)
    if device == "cpu":
        notes.append(_ON_CPU)
    return notes
