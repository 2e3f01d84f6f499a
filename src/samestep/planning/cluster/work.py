"""What a device computes, moves and exchanges in one step: numbers of a recipe and its model, of no cluster yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from samestep import memory, models
from samestep.bench.flops import Decoder, forward_flops
from samestep.engines import build
from samestep.precision.plan import Plan
from samestep.recipe.schema import OffloadParts, Recipe

# A saved activation is written and read in the forward pass; in the backward pass it is read, and a gradient of its
# size written and read. Recomputing writes and reads it once more.
_FORWARD_ACCESSES, _BACKWARD_ACCESSES = 2, 3


@dataclass(frozen=True, kw_only=True)
class UnitWork:
    """One shard unit. FLOPs and bytes of one micro-batch of full rows, `float8_share` of the FLOPs in float8.

    `elements` are gathered, `trainable` of them reduced; the moved bytes are what the device's memory moves outside of
    matrix multiplications.
    """

    elements: int
    trainable: int
    forward: float = 0.0
    backward: float = 0.0
    float8_share: float = 0.0
    forward_moved: float = 0.0
    backward_moved: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Offloaded:
    """What of the training state lives on the host."""

    parameters: bool = False
    optimizer: bool = False
    nvme: bool = False


@dataclass(frozen=True, kw_only=True)
class Work:
    """One step of a recipe. Tokens are of one micro-batch and rank, bytes are of one element."""

    engine: str
    shard_ranks: int
    ranks: int
    tokens: int
    micro_batches: int
    root: UnitWork
    blocks: Sequence[UnitWork]
    compute: torch.dtype
    compute_bytes: int
    reduce_bytes: int
    gradient_bytes: int
    master_bytes: int
    state_bytes: int
    """Bytes that the optimizer keeps of an element: moments and compensation."""
    reduces_every_micro_batch: bool
    reshards: bool
    tree: bool
    offloaded: Offloaded

    @property
    def units(self) -> list[UnitWork]:
        return [self.root, *self.blocks]

    @property
    def trainable(self) -> int:
        return sum(unit.trainable for unit in self.units)


def work_of(recipe: Recipe, model: nn.Module, *, recomputed: float | None = None) -> Work:
    """The work of a recipe and its model, which may be on the meta device.

    `recomputed` is the share of the blocks' forward FLOPs that the backward pass repeats; None is what the recipe asks
    for: all or nothing.
    """
    plan, engine = build.resolve_plan(recipe, model), recipe.engine
    if recomputed is None:
        recomputed = 1.0 if recipe.train.activation_checkpointing else 0.0
    units = models.unit_modules(model, engine.unit_classes)
    tokens = recipe.train.micro_batch * recipe.data.max_tokens
    saved = memory.activations_bytes(model, recipe, plan.compute)["plain"] / max(1, len(units))
    taken: set[int] = set()
    unsharded = build.unsharded_names(recipe, model)
    whole = {id(p) for name, p in model.named_parameters() if name in unsharded}
    float8 = _float8_weights(model, plan)
    scores = _attention_flops(model, recipe) / max(1, len(units))
    blocks = [
        _unit(unit, taken, tokens, whole, float8, scores=scores, recomputed=recomputed, saved=saved) for unit in units
    ]
    logits = memory.logits_bytes(model, recipe, plan.compute)
    root = _unit(model, taken, tokens, whole, float8, scores=0.0, recomputed=0.0, saved=logits)
    return Work(
        engine=engine.name,
        shard_ranks=engine.sharing_ranks,
        ranks=engine.ranks,
        tokens=tokens,
        micro_batches=recipe.train.accumulation,
        root=root,
        blocks=blocks,
        compute=plan.compute,
        compute_bytes=plan.compute.itemsize,
        reduce_bytes=plan.reduce.itemsize,
        gradient_bytes=plan.gradient.itemsize,
        master_bytes=plan.master.itemsize,
        state_bytes=sum(memory.optimizer_state(recipe, plan, 1).values()),
        reduces_every_micro_batch=engine.reduce_every == "micro_batch",
        reshards=engine.reshard_after_forward or engine.name == "zero3",
        tree=engine.reduce_order == "tree",
        offloaded=_offloaded(recipe),
    )


def _unit(
    module: nn.Module,
    taken: set[int],
    tokens: int,
    whole: set[int],
    float8: set[int],
    *,
    scores: float,
    recomputed: float,
    saved: float,
) -> UnitWork:
    """The unit of a module without the parameters that units before it took; marks its own as taken. `whole` are ids of
    parameters that are never sharded, `float8` of those that multiply in float8.

    A weight multiplies every token once in the forward pass; in the backward pass once for the gradient of its input
    and, where it trains, once for its own.
    """
    mine = [p for p in module.parameters() if id(p) not in taken]
    looked_up = _looked_up(module)
    multiplied = [p for p in mine if p.dim() >= 2 and id(p) not in looked_up]
    forward = 2.0 * tokens * sum(p.numel() for p in multiplied)
    own = 2.0 * tokens * sum(p.numel() for p in multiplied if p.requires_grad)
    in_float8 = sum(p.numel() for p in multiplied if id(p) in float8)
    taken.update(map(id, mine))
    return UnitWork(
        elements=sum(p.numel() for p in mine if id(p) not in whole),
        trainable=sum(p.numel() for p in mine if p.requires_grad),
        forward=forward + scores,
        backward=forward + own + 2 * scores + recomputed * (forward + scores),
        float8_share=2.0 * tokens * in_float8 / (forward + scores) if in_float8 else 0.0,
        forward_moved=_FORWARD_ACCESSES * saved,
        backward_moved=(_BACKWARD_ACCESSES + _FORWARD_ACCESSES * recomputed) * saved,
    )


def _looked_up(module: nn.Module) -> set[int]:
    """Ids of the tables that only embeddings use: looking a row up multiplies nothing."""
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    return embeddings - {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear)}


def _float8_weights(model: nn.Module, plan: Plan) -> set[int]:
    names = set(plan.float8.names)
    return {id(m.weight) for path, m in model.named_modules() if path in names and isinstance(m, nn.Linear)}


def _attention_flops(model: nn.Module, recipe: Recipe) -> float:
    """FLOPs of scores and weighted sums in one forward pass of a micro-batch, over all layers: of the pairs that a
    causal mask lets through, but `eager` computes all of them."""
    decoder, length = Decoder.of(model), recipe.data.max_tokens
    mask = "full" if recipe.model.attention == "eager" else "causal"
    return recipe.train.micro_batch * (forward_flops(decoder, [length], mask) - 2.0 * decoder.weights * length)


def _offloaded(recipe: Recipe) -> Offloaded:
    offload, zero = recipe.engine.offload, recipe.engine.name.startswith("zero")
    if isinstance(offload, OffloadParts):
        parts = (offload.parameters, offload.optimizer)
        return Offloaded(parameters=parts[0] != "none", optimizer=parts[1] != "none", nvme="nvme" in parts)
    cpu = offload == "cpu"
    return Offloaded(parameters=cpu and (not zero or recipe.engine.name == "zero3"), optimizer=cpu)
