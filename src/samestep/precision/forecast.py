"""Forecast, before a run, of the shares of updates that rounding will make vanish, and of the tensors that cannot move.

*Lost*: the master does not move. *Unseen*: the master moves, the copy that the forward pass uses does not. *Dropped*:
what the run has done to a weight by then is gone in a 16-bit export.

The model
---------
Weights are the real ones (samples), rounding is the dtypes' own; only the gradients are made up. Per weight the
gradient of step t, in units of its root mean square, is x_t = c * sign + sqrt(1 - c**2) * e_t: a part `c` (the
*persistence*) that keeps its direction for the whole run, and white normal noise e_t. Weights differ in c: it is spread
exponentially with a mean of `PERSISTENCE`, so that some hardly get anywhere. Adam itself is then carried out,
on `PATHS` such weights, with the run's betas and learning rates, and every sampled weight follows one of them. So a
weight moves as a straight line plus a random walk: in t steps of a constant rate by about c * lr * t and sqrt(1 -
c**2) * lr * sqrt(t). With D the displacement before a step and u the step, it is counted what vanishes: lost where
master(w + u) == w, unseen where compute(w + D + u) == compute(w + D), dropped where export(w + D + u) == export(w).

Exact whatever c is: the first step is lr for every weight (Adam's moments cancel). Beyond `SIMULATED` steps line and
walk go on by these formulas.

Its limits
----------
The spread of c is the same in all tensors and steps. It was fitted to fine-tuning runs of 20 to 200 steps of two
models, whose displacements alone gave a c between 0.2 and 0.45. It is smaller with small batches, and later in a run:
a run that swings around a minimum moves less than forecast. Weight decay, clipping and eps are left out: they matter
where a weight's gradient is tiny. Weights without any gradient (embeddings of tokens that do not occur) have no
update: they are in no share of updates, but their copies stay the same. Under `low` a weight is taken to be where it
was loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from samestep.dtypes import DTYPES
from samestep.precision.plan import Plan
from samestep.recipe.schema import Precision

SAMPLES = 400_000
_PER_TENSOR = (512, 65_536)
PERSISTENCE = 0.33
PATHS = 4096
SIMULATED = 1000
"""Steps that are carried out one by one."""
CLASSES = ("embedding", "attention", "mlp", "norm", "bias", "head", "other")
HORIZONS = (1, 10, 100, 1000)
_ATTENTION = ("attn", "attention", "q_proj", "k_proj", "v_proj", "o_proj", "qkv")
_MLP = ("mlp", "ffn", "feed_forward", "expert", "gate_proj", "up_proj", "down_proj", "fc1", "fc2", "c_fc")


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Samples of one trainable tensor: `values` [n], in the dtype it was loaded in, of `numel` elements."""

    name: str
    numel: int
    dimensions: int
    values: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Where updates are rounded. `update` and `cast` are nearest, stochastic or (update) compensated.

    `export` is None for an export that keeps the loaded dtype.
    """

    master: torch.dtype
    compute: torch.dtype
    update: str
    cast: str
    export: torch.dtype | None
    export_rounding: str

    @classmethod
    def of(cls, precision: Precision, plan: Plan) -> Rounding:
        """Where a plan of this recipe rounds."""
        by_default = "stochastic" if precision.regime.endswith("stochastic") else "nearest"
        return cls(
            master=plan.master,
            compute=plan.compute,
            update=plan.update,
            cast=plan.cast,
            export=None if precision.export_dtype == "loaded" else DTYPES[precision.export_dtype],
            export_rounding=precision.export_rounding or by_default,
        )


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares after `steps` steps, from 0 to 1; None where rounding is stochastic: in expectation nothing vanishes.

    `lost` and `unseen` are shares of the updates of that one step, of learning rate `lr`, as steps.jsonl measures them:
    steps of a rate that has nearly decayed to 0 may be lost even by fp32. `copy_unchanged` is
    the share of weights whose low-precision copy is still the one that was loaded; `dropped` the share of weights that
    an export at that moment would show unmoved although they have moved.
    """

    steps: int
    lr: float
    lost: float | None
    unseen: float | None
    copy_unchanged: float | None
    dropped: float | None


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """`first` is for an update of the highest learning rate on the loaded weights: what the guard looks at for lost.

    `never_move` names the tensors of which no sampled weight's master (low) or copy (mixed) can change, even if every
    step of the run went in one direction.
    """

    weights: int
    sampled: int
    peak_lr: float
    first: Shares
    after: tuple[Shares, ...]
    by_class: dict[str, tuple[Shares, ...]]
    first_by_class: dict[str, Shares]
    weights_by_class: dict[str, int]
    never_move: tuple[str, ...]


def samples_per_tensor(tensors: int) -> int:
    """How many elements are looked at of each of so many tensors."""
    low, high = _PER_TENSOR
    return min(high, max(low, SAMPLES // max(1, tensors)))


def sampled(model: nn.Module) -> tuple[Weights, ...]:
    """Samples of the trainable tensors of a model that holds them whole."""
    trainable = [(name, p.detach()) for name, p in model.named_parameters() if p.requires_grad]
    limit = samples_per_tensor(len(trainable))
    return tuple(
        Weights(
            name=name,
            numel=tensor.numel(),
            dimensions=tensor.dim(),
            values=tensor.reshape(-1)[:: max(1, -(-tensor.numel() // limit))].clone(),
        )
        for name, tensor in trainable
    )


def tensor_class(name: str, dimensions: int) -> str:
    """Which of CLASSES a parameter belongs to, by its name: "model.layers.0.mlp.up_proj.weight" is "mlp"."""
    low = name.lower()
    module = low.rpartition(".")[0]
    last = module.rpartition(".")[2]
    if low.endswith("bias"):
        return "bias"
    if "norm" in last or last.startswith("ln_") or last in ("ln", "ln1", "ln2"):
        return "norm"
    if "lm_head" in low or last in ("embed_out", "output"):
        return "head"
    if "embed" in low or last in ("wte", "wpe"):
        return "embedding"
    if any(part in module for part in _ATTENTION):
        return "attention"
    if any(part in module for part in _MLP):
        return "mlp"
    return "norm" if dimensions == 1 else "other"


def forecast(
    weights: Sequence[Weights],
    lrs: Sequence[float],
    rounding: Rounding,
    *,
    betas: Sequence[float] = (0.9, 0.999),
    persistence: float = PERSISTENCE,
) -> Forecast:
    """The forecast of an AdamW run over the schedule `lrs`, the learning rate of every step.

    Every tensor counts by its number of elements. Equal arguments give equal results.
    """
    assert weights and lrs
    horizons = sorted({h for h in HORIZONS if h < len(lrs)} | {len(lrs)})
    peak, distance = max(lrs), math.fsum(lrs)
    moving = motions(lrs, horizons, betas=betas, persistence=spread_of(persistence))
    tables, first, never = [_Table() for _ in horizons], _Table(), []
    random = torch.Generator().manual_seed(0)
    for tensor in weights:
        kind = tensor_class(tensor.name, tensor.dimensions)
        place = _Place.of(tensor.values, rounding)
        path = torch.randint(0, PATHS, (tensor.values.numel(),), generator=random)
        sign = (path % 2).double() * -2 + 1
        first.add(kind, tensor.numel, place.counts(torch.zeros_like(sign), sign * peak, sign * peak))
        for motion, table in zip(moving, tables, strict=True):
            table.add(kind, tensor.numel, place.counts(motion.before[path], motion.step[path], sign * motion.reach))
        if place.is_stuck(step=peak, distance=distance):
            never.append(tensor.name)
    kinds = [kind for kind in CLASSES if kind in first.numel]
    rows = list(zip(horizons, tables, strict=True))
    return Forecast(
        weights=sum(tensor.numel for tensor in weights),
        sampled=sum(tensor.values.numel() for tensor in weights),
        peak_lr=peak,
        first=first.shares(1, peak, rounding),
        after=tuple(table.shares(step, lrs[step - 1], rounding) for step, table in rows),
        by_class={
            kind: tuple(table.shares(step, lrs[step - 1], rounding, kind) for step, table in rows) for kind in kinds
        },
        first_by_class={kind: first.shares(1, peak, rounding, kind) for kind in kinds},
        weights_by_class={kind: first.numel[kind] for kind in kinds},
        never_move=tuple(never),
    )


@dataclass(frozen=True, kw_only=True)
class Motion:
    """How the weights of every path [PATHS] move: the displacement `before` step number `steps`, the `step` itself, and
    the largest step until then, `reach`."""

    steps: int
    before: torch.Tensor
    step: torch.Tensor
    reach: float


def spread_of(mean: float) -> torch.Tensor:
    """c of every path: an exponential distribution of this mean at evenly spaced ranks, cut off at 1. fp64 [PATHS].

    Two neighbours have one value: one of them goes up and one down.
    """
    rank = (torch.arange(PATHS, dtype=torch.float64) // 2 * 2 + 1) / PATHS
    return (-mean * torch.log1p(-rank)).nan_to_num(posinf=1.0).clamp(max=1.0)


def motions(
    lrs: Sequence[float], horizons: Sequence[int], *, betas: Sequence[float], persistence: torch.Tensor
) -> list[Motion]:
    """Adam on PATHS weights with made-up gradients, looked at in the steps `horizons` (rising, counted from 1).

    `persistence` is c of every path, fp64 [PATHS].
    """
    random = torch.Generator().manual_seed(0)
    spread = (1 - persistence**2).sqrt()
    # Signs in equal numbers; every path is met as often upward as downward.
    straight = torch.ones(PATHS, dtype=torch.float64)
    straight[1::2] = -1
    first, second, displaced, step = (torch.zeros(PATHS, dtype=torch.float64) for _ in range(4))
    unit = torch.zeros(PATHS, dtype=torch.float64)
    found, seen, reach = [], 0, 0.0
    for horizon in horizons:
        for t in range(seen + 1, min(horizon, SIMULATED) + 1):
            gradient = torch.randn(PATHS, generator=random, dtype=torch.float64) * spread + straight * persistence
            first.lerp_(gradient, 1 - betas[0])
            second.lerp_(gradient * gradient, 1 - betas[1])
            displaced += step
            unit = (first / (1 - betas[0] ** t)) / (second / (1 - betas[1] ** t)).sqrt()
            step = unit * lrs[t - 1]
        if horizon > SIMULATED:
            rest = lrs[max(seen, SIMULATED) - 1 : horizon - 1]
            noise = torch.randn(PATHS, generator=random, dtype=torch.float64)
            displaced = displaced + straight * persistence * math.fsum(rest)
            displaced += noise * spread * math.sqrt(math.fsum(lr * lr for lr in rest))
            step = unit * lrs[horizon - 1]
        reach = max(reach, *lrs[seen:horizon])
        seen = horizon
        found.append(Motion(steps=horizon, before=displaced.clone(), step=step, reach=reach))
    return found


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Sampled weights on every grid they are rounded to."""

    loaded: torch.Tensor
    rounding: Rounding
    export: torch.dtype

    @classmethod
    def of(cls, values: torch.Tensor, rounding: Rounding) -> _Place:
        # Loading a master in a narrower dtype rounds it, once, before the run.
        return cls(
            loaded=values.to(rounding.master).double(), rounding=rounding, export=rounding.export or values.dtype
        )

    @property
    def _carries(self) -> bool:
        """Whether the master, or the error it carries along, takes every update."""
        return self.rounding.master == torch.float32 or self.rounding.update == "compensated"

    def counts(self, before: torch.Tensor, step: torch.Tensor, largest: torch.Tensor) -> dict[str, float]:
        """Shares among these samples, from displacements [n]: before a step, of the step, of the largest so far."""
        if self.rounding.update == "nearest" and not self._carries:
            return self._counts_of_low(step, largest)
        # A stochastic or compensated bf16 master holds, in expectation or with its compensation, what fp32 would.
        start, compute = self.loaded.float(), self.rounding.compute
        here, there = (self.loaded + before).float(), (self.loaded + before + step).float()
        moved = here != there
        same_copy = there.to(compute) == here.to(compute)
        return {
            "lost": _mean(~moved),
            "unseen": _mean(moved & same_copy),
            "copy": _mean(there.to(compute) == start.to(compute)),
            "dropped": _mean((there != start) & (there.to(self.export) == start.to(self.export))),
        }

    def _counts_of_low(self, step: torch.Tensor, largest: torch.Tensor) -> dict[str, float]:
        start, master = self.loaded, self.rounding.master
        lost, never = ((start + move).to(master) == start.to(master) for move in (step, largest))
        held = (start + largest).to(master)
        dropped = ~never & (held.to(self.export) == start.to(master).to(self.export))
        return {"lost": _mean(lost), "unseen": 0.0, "copy": _mean(never), "dropped": _mean(dropped)}

    def is_stuck(self, *, step: float, distance: float) -> bool:
        """Whether no sample can move: its master by single steps, or, where masters carry them, its copy by all."""
        r, start = self.rounding, self.loaded
        if r.update == "stochastic" or r.cast == "stochastic":
            return False
        dtype, reach = (r.compute, distance) if self._carries else (r.master, step)
        return all(bool(((start + sign * reach).to(dtype) == start.to(dtype)).all()) for sign in (-1, 1))


class _Table:
    """Shares added up over tensors, by class, each tensor by its number of elements."""

    def __init__(self) -> None:
        self.numel: dict[str, int] = {}
        self._sums: dict[str, dict[str, float]] = {}

    def add(self, kind: str, numel: int, shares: Mapping[str, float]) -> None:
        self.numel[kind] = self.numel.get(kind, 0) + numel
        sums = self._sums.setdefault(kind, dict.fromkeys(shares, 0.0))
        for what, share in shares.items():
            sums[what] += share * numel

    def shares(self, steps: int, lr: float, rounding: Rounding, kind: str | None = None) -> Shares:
        kinds = [kind] if kind is not None else list(self.numel)
        numel = sum(self.numel[k] for k in kinds)
        mean: dict[str, Any] = {
            what: sum(self._sums[k][what] for k in kinds) / numel for what in ("lost", "unseen", "copy", "dropped")
        }
        stochastic_copy = "stochastic" in (rounding.update, rounding.cast)
        return Shares(
            steps=steps,
            lr=lr,
            lost=None if rounding.update == "stochastic" else mean["lost"],
            unseen=None if stochastic_copy else mean["unseen"],
            copy_unchanged=None if stochastic_copy else mean["copy"],
            dropped=None if rounding.export_rounding == "stochastic" else mean["dropped"],
        )


def _mean(flags: torch.Tensor) -> float:
    return float(flags.double().mean()) if flags.numel() else 0.0
