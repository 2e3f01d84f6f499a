"""Memory per rank, item by item, from shapes and the precision plan alone: for every engine and regime, before a run.

P trainable elements in `m` bytes (master dtype) and `c` bytes (compute dtype), N ranks, S of which share one copy:

| engine | after a step | more before the step |
|---|---|---|
| single, ddp | master m, moments 2m | gradients m |
| fsdp, hsdp | (m + 2m) / S | m / S |
| zero1, bf16 and fp32 masters | c + 4 + (m + 2m) / N: DeepSpeed keeps all gradients in fp32 | c: and again in bf16 |
| zero1 otherwise, zero2 | c + (m + 2m) / N: a second copy of the weights | m / N |
| zero3 | (c + m + m + 2m) / N: a copy of the weights, and gradients that stay | 0 |

to which come the compensation of low-kahan (2 / S), frozen weights, buffers, and what comes and goes: gathered weights,
reduce buffers (on zero3 permanent: engine.bucket_elements of them), activations, logits and the optimizer's
temporaries. The peak is the highest of three moments: when the backward pass begins, when it ends, and in the step.

Weights, gradients, moments and permanent buffers are exact. Gather and reduce buffers follow the engines' sources.
Activations and logits are estimates for a decoder with the usual blocks, from its config (`activations_bytes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import nn
from transformers import PretrainedConfig

from samestep import models
from samestep.engines import build
from samestep.engines.deepspeed_config import reduce_bucket
from samestep.errors import SamestepError
from samestep.optim import is_decayed
from samestep.precision import plan as precision_plan
from samestep.precision.plan import Plan
from samestep.recipe import override
from samestep.recipe.schema import EngineName, OffloadParts, Recipe, RegimeName

# From the most exact regime to the least: of two that need equally much, the first is the better choice.
REGIMES = ("full", "mixed-stochastic", "mixed", "low-stochastic", "low-kahan", "low", "mixed-fp8")
assert set(REGIMES) == set(get_args(RegimeName))
ITEMS = (
    "weights",
    "masters",
    "gradients",
    "moments",
    "compensation",
    "frozen",
    "buffers",
    "gather_buffers",
    "reduce_buffers",
    "activations",
    "logits",
    "optimizer_temporaries",
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes on one rank. `items` are those at the peak and add up to `peak_bytes`; the two other totals are of tensors
    that live after an optimizer step and after the last backward pass. `host_bytes` is what offload moved to the host.

    `activations` has the estimate with and without checkpointing, `largest_buffer_bytes` the largest single buffer
    of a collective.
    """

    engine: str
    regime: str
    ranks: int
    parameters: int
    items: dict[str, int]
    after_step_bytes: int
    after_backward_bytes: int
    host_bytes: int
    activations: dict[str, int]
    largest_buffer_bytes: int

    @property
    def peak_bytes(self) -> int:
        return sum(self.items.values())


@dataclass(kw_only=True)
class _Parts:
    """Bytes by item: held all the time, from the first reduction to the step, and during the passes only."""

    held: dict[str, int]
    gradients: int
    gather: int = 0
    reduce: int = 0
    whole_gradients: int = 0
    """Gradients that are not sharded yet while micro-batches accumulate."""
    largest_buffer: int = 0
    host: dict[str, int] = field(default_factory=dict)


def table(recipe: Recipe, model: nn.Module) -> list[Estimate]:
    """An estimate for every engine and regime that the recipe's ranks, dtypes and optimizer allow.

    `model` may be on the meta device. Order: EngineName's, then REGIMES.
    """
    return [
        estimate(variant, model)
        for engine in get_args(EngineName)
        for regime in REGIMES
        if (variant := _variant(recipe, engine, regime)) is not None
    ]


def cheapest(estimates: Sequence[Estimate], device_bytes: int) -> Estimate | None:
    """The estimate of several ranks' engines that fits and has the lowest peak; of equals the most exact regime."""
    fitting = [e for e in estimates if e.peak_bytes <= device_bytes]
    return min(fitting, key=lambda e: (e.peak_bytes, REGIMES.index(e.regime)), default=None)


def estimate(recipe: Recipe, model: nn.Module) -> Estimate:
    """The estimate of one recipe for its model (which may be on the meta device)."""
    zero = recipe.engine.name.startswith("zero")
    plan = precision_plan.resolve(recipe.precision, model, casts_frozen=zero)
    parts = _zero(recipe, plan, model) if zero else _torch(recipe, plan, model)
    _offload(recipe, parts)
    activations = activations_bytes(model, recipe, plan.compute)
    used = activations["checkpointed" if recipe.train.activation_checkpointing else "plain"]
    held = sum(parts.held.values())
    return Estimate(
        engine=recipe.engine.name,
        regime=plan.regime,
        ranks=recipe.engine.ranks,
        parameters=sum(p.numel for p in plan.parameters),
        items=_peak(recipe, plan, parts, activations=used, logits=logits_bytes(model, recipe, plan.compute)),
        after_step_bytes=held,
        after_backward_bytes=held + parts.gradients,
        host_bytes=sum(parts.host.values()),
        activations=activations,
        largest_buffer_bytes=parts.largest_buffer,
    )


def activations_bytes(model: nn.Module, recipe: Recipe, compute: torch.dtype) -> dict[str, int]:
    """What the blocks of a Llama-like decoder save for the backward pass of one micro-batch of full rows: "plain", and
    "checkpointed", when each block keeps its input only and is recomputed, one at a time.

    Per token: two norms (an fp32 copy of the input, the normalised value, the output), query, key, value and output of
    the attention, gate, activated gate, up and product of the MLP. Other blocks differ: an estimate.
    """
    config, c = models.config_of(model), compute.itemsize
    rows, length = recipe.train.micro_batch, recipe.data.max_tokens
    hidden, layers = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
    heads = _size(config, "num_attention_heads") or 1
    head = _size(config, "head_dim") or hidden // heads
    keys = (_size(config, "num_key_value_heads") or heads) * head
    inner = _size(config, "intermediate_size") or 4 * hidden
    norm = (4 + 2 * c) * hidden
    block = 2 * norm + c * (2 * heads * head + 2 * keys + 4 * inner)
    if recipe.model.attention == "eager":
        block += heads * length * (4 + 2 * c)
    tokens = rows * length
    return {
        "plain": tokens * (layers * block + norm),
        "checkpointed": tokens * (layers * c * hidden + block + norm),
    }


def logits_bytes(model: nn.Module, recipe: Recipe, compute: torch.dtype) -> int:
    """The logits of one micro-batch of full rows when their backward pass begins: in the compute dtype, and in fp32 the
    log-probabilities and the gradients of these and of the logits."""
    tokens = recipe.train.micro_batch * recipe.data.max_tokens
    return tokens * _size(models.config_of(model), "vocab_size") * (compute.itemsize + 3 * 4)


def _size(config: PretrainedConfig, name: str) -> int:
    return int(getattr(config, name, None) or 0)


def _variant(recipe: Recipe, engine: str, regime: str) -> Recipe | None:
    ranks = recipe.engine.ranks
    if engine == "hsdp" and ranks < 2:
        return None
    # Settings that other engines do not have go back to their defaults.
    fresh = type(recipe.engine)(name=engine, ranks=ranks)  # pyrefly: ignore[bad-argument-type]
    kept = ("reduce_order", "unit_classes", "bucket_elements", "prefetch_elements", "live_elements")
    kept += ("persistent_elements", "reshard_after_forward", "reduce_every", "offload")
    if engine == recipe.engine.name:
        fresh = recipe.engine
    else:
        same_family = engine.startswith("zero") == recipe.engine.name.startswith("zero")
        shared = {name: getattr(recipe.engine, name) for name in kept if same_family or name == "unit_classes"}
        if engine == "single" or isinstance(recipe.engine.offload, OffloadParts):
            shared.pop("offload", None)
        if engine in ("zero2", "zero3"):
            shared.pop("reduce_every", None)
        fresh = fresh.model_copy(update=shared)
    precision = recipe.precision.model_copy(update={"regime": regime})
    variant = recipe.model_copy(update={"engine": fresh, "precision": precision})
    try:
        return override(variant, [])
    except SamestepError:
        return None


def _chunk(shape: Sequence[int], shards: int) -> int:
    """Elements of the largest share of a tensor that is cut along its first dimension."""
    if not shape:
        return 1
    rest = torch.Size(shape[1:]).numel()
    return -(-shape[0] // shards) * rest


def optimizer_state(recipe: Recipe, plan: Plan, elements: int) -> dict[str, int]:
    """Bytes of the optimizer's state of so many elements, by kind."""
    optimizer = recipe.train.optimizer
    moments = 2 if optimizer.name == "adamw" else int(optimizer.momentum > 0)
    compensation = elements * plan.master.itemsize if plan.update == "compensated" else 0
    return {"moments": moments * elements * plan.moments.itemsize, "compensation": compensation}


def _buffers(plan: Plan) -> int:
    return sum(buffer.numel * buffer.held.itemsize for buffer in plan.buffers)


def _torch(recipe: Recipe, plan: Plan, model: nn.Module) -> _Parts:
    engine = recipe.engine
    ranks = engine.ranks
    shards = engine.sharing_ranks
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    whole = build.unsharded_names(recipe, model)
    mine = sum(_chunk(shapes[p.name], shards) for p in plan.trainable)
    frozen = sum(
        (p.numel if p.name in whole else _chunk(shapes[p.name], shards)) * p.held.itemsize
        for p in plan.parameters
        if not p.trainable
    )
    held = {"masters": mine * plan.master.itemsize, "frozen": frozen, "buffers": _buffers(plan)}
    gradients = mine * plan.gradient.itemsize
    units = _unit_elements(model, engine.unit_classes)
    largest = max(units)
    # The root stays gathered through both passes, units come one by one with the next one on its way; what is on its
    # way arrives in one flat buffer.
    elements = units[0] + 2 * max(units[1:], default=0) if engine.reshard_after_forward else sum(units)
    parts = _Parts(
        held=held | optimizer_state(recipe, plan, mine),
        gradients=gradients,
        gather=(elements + largest) * plan.compute.itemsize,
        largest_buffer=largest * max(plan.compute.itemsize, plan.reduce.itemsize),
    )
    # A unit's gradients as autograd made them, and the buffer that they cross the ranks in.
    parts.reduce = largest * (plan.compute.itemsize + plan.reduce.itemsize)
    if engine.reduce_order == "tree" and shards > 2:
        parts.reduce += largest * plan.reduce.itemsize
    if engine.name == "single" and ranks > 1:
        # Partial sums over the emulated ranks, one per level of the tree.
        parts.whole_gradients = (ranks - 1).bit_length() * gradients
    elif engine.reduce_every == "step" and recipe.train.accumulation > 1:
        parts.whole_gradients = sum(p.numel for p in plan.trainable) * plan.reduce.itemsize
    return parts


def _zero(recipe: Recipe, plan: Plan, model: nn.Module) -> _Parts:
    stage = int(recipe.engine.name.removeprefix("zero"))
    return _zero3(recipe, plan) if stage == 3 else _zero12(recipe, plan, stage)


def _zero12(recipe: Recipe, plan: Plan, stage: int) -> _Parts:
    ranks, compute = recipe.engine.ranks, plan.compute.itemsize
    # Two groups, decayed and not, each padded to whole 4-byte words for every rank.
    whole = 0
    for decayed in (True, False):
        group = sum(p.numel for p in plan.trainable if is_decayed(p.name, recipe.train.optimizer) == decayed)
        whole += -(-group // (2 * ranks)) * 2 * ranks
    mine = whole // ranks
    frozen = sum(p.numel * p.held.itemsize for p in plan.parameters if not p.trainable)
    held = {"weights": whole * compute, "masters": mine * plan.master.itemsize, "frozen": frozen}
    held |= {"buffers": _buffers(plan)} | optimizer_state(recipe, plan, mine)
    bucket = reduce_bucket(recipe.engine, plan)
    crossing = bucket * plan.reduce.itemsize
    keeps_all = stage == 1 and plan.compute == torch.bfloat16 and plan.gradient == torch.float32
    # A gradient larger than the bucket crosses alone; where all are kept in fp32, they cross together.
    largest = whole if keeps_all else min(whole, max(bucket, max(p.numel for p in plan.trainable)))
    if keeps_all:
        held["gradients"] = whole * plan.gradient.itemsize
        gradients, reduce = whole * compute, crossing
    else:
        gradients = mine * plan.gradient.itemsize
        staging = plan.gradient.itemsize if stage == 1 else compute
        reduce = bucket * staging + (crossing if plan.reduce.itemsize != staging else 0)
    parts = _Parts(held=held, gradients=gradients, reduce=reduce, largest_buffer=largest * plan.reduce.itemsize)
    if recipe.engine.reduce_every == "step" and recipe.train.accumulation > 1:
        parts.whole_gradients = mine * plan.gradient.itemsize
    return parts


def _zero3(recipe: Recipe, plan: Plan) -> _Parts:
    engine, compute, bucket = recipe.engine, plan.compute.itemsize, reduce_bucket(recipe.engine, plan)
    share = {p.name: -(-p.numel // engine.ranks) for p in plan.parameters}
    mine = sum(share[p.name] for p in plan.trainable)
    persistent = sum(p.numel for p in plan.parameters if p.numel < engine.persistent_elements)
    total = sum(p.numel for p in plan.parameters)
    held = {
        "weights": mine * compute,
        "masters": mine * plan.master.itemsize,
        "gradients": mine * plan.gradient.itemsize,
        "frozen": sum(share[p.name] * p.held.itemsize for p in plan.parameters if not p.trainable),
        "buffers": _buffers(plan),
        "gather_buffers": persistent * compute,
        # Allocated once.
        "reduce_buffers": bucket * plan.reduce.itemsize,
    }
    largest = max(p.numel for p in plan.parameters)
    live = min(total, max(largest, engine.live_elements + engine.prefetch_elements))
    return _Parts(
        held=held | optimizer_state(recipe, plan, mine),
        gradients=0,
        gather=max(0, live - persistent) * compute,
        reduce=bucket * plan.reduce.itemsize,
        largest_buffer=max(largest * compute, min(total, max(largest, bucket)) * plan.reduce.itemsize),
    )


def _unit_elements(model: nn.Module, class_names: list[str] | None) -> list[int]:
    """Elements of the root unit, then of every other shard unit."""
    taken: set[int] = set()
    sizes = []
    for unit in models.unit_modules(model, class_names):
        mine = [p for p in unit.parameters() if id(p) not in taken]
        taken.update(map(id, mine))
        sizes.append(sum(p.numel() for p in mine))
    return [sum(p.numel() for p in model.parameters() if id(p) not in taken), *sizes]


def _offload(recipe: Recipe, parts: _Parts) -> None:
    """Moves what the recipe offloads from the device to the host (or to nvme)."""
    offload = recipe.engine.offload
    zero = recipe.engine.name.startswith("zero")
    if isinstance(offload, OffloadParts):
        optimizer, weights = offload.optimizer != "none", offload.parameters != "none"
    else:
        optimizer = offload == "cpu"
        weights = optimizer and (not zero or recipe.engine.name == "zero3")
    names = [*(["masters", "moments", "compensation", "gradients"] if optimizer else [])]
    names += ["weights", "frozen"] if weights else []
    for name in names:
        parts.host[name] = parts.held.pop(name, 0)
    if optimizer:
        parts.host["gradients"] += parts.gradients
        parts.gradients = 0


def _peak(recipe: Recipe, plan: Plan, parts: _Parts, *, activations: int, logits: int) -> dict[str, int]:
    """Bytes by item at the highest of three moments."""
    accumulates = recipe.train.accumulation > 1 or (recipe.engine.name == "single" and recipe.engine.ranks > 1)
    # torch's AdamW holds the root of the second moment of all its tensors; ours works in small chunks.
    chunked = plan.update != "nearest" or recipe.train.optimizer.name != "adamw"
    temporaries = 0 if chunked else parts.held.get("masters", 0)
    begin = {"gather_buffers": parts.gather, "activations": activations, "logits": logits}
    if accumulates:
        begin["gradients"] = parts.gradients + parts.whole_gradients
    end = {
        "gradients": parts.gradients + parts.whole_gradients,
        "gather_buffers": parts.gather,
        "reduce_buffers": parts.reduce,
    }
    step = {"gradients": parts.gradients, "optimizer_temporaries": temporaries}
    highest = max((begin, end, step), key=lambda moment: sum(moment.values()))
    return {name: parts.held.get(name, 0) + highest.get(name, 0) for name in ITEMS}
