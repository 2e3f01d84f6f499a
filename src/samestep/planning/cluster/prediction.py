"""The predicted step of a recipe on a cluster, as data: `samestep plan --cluster ... --json`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from samestep import memory, models
from samestep.bench.flops import Decoder, mfu, model_flops, six_n
from samestep.errors import EngineError
from samestep.planning.cluster.calibration import REACHED
from samestep.planning.cluster.costs import Costs
from samestep.planning.cluster.description import Cluster
from samestep.planning.cluster.machine import Machine, machine_of
from samestep.planning.cluster.work import Work, work_of
from samestep.recipe import override
from samestep.recipe.schema import Recipe

_ASSUMED = (
    "every row has data.max_tokens tokens; under a causal mask half of the attention scores are computed (eager: all)",
    "weights are gathered while the unit before computes, gradients reduced while the next one does: the longer of "
    "what links carry and devices compute counts, and communication does not slow computing down",
    "activations are those of a Llama-like block; each is written and read once in the forward pass, read once in the "
    "backward pass, and a gradient of its size is written and read; that and matrix multiplications take turns",
    "the optimizer reads and writes its state once; clipping, data, evaluation and checkpoints take no time",
    "the memory plan leaves out what allocator and libraries keep for themselves (1 to 2 GB and more)",
    f"the range is what held-out published results reached of their predictions: {REACHED[0]:.0%} to {REACHED[1]:.0%}",
)


def predict(recipe: Recipe, cluster: Cluster) -> dict[str, Any]:
    """Step time, throughput, MFU and cost of a recipe on a cluster, what limits it, and what was assumed.

    engine.ranks becomes the number of devices. Where the memory plan does not fit the device, everything that would
    need it to is None. Reads the model's config only. Raises SamestepError.
    """
    ranks = cluster.ranks
    if recipe.engine.name == "single" and ranks != 1:
        raise EngineError(
            f"single is one process, but the cluster has {ranks} devices",
            where="engine.name",
            remedy="Choose another engine, or one node with one device.",
        )
    recipe = override(recipe, [f"engine.ranks={ranks}"])
    model = models.load_meta_model(recipe.model)
    work = work_of(recipe, model)
    machine = machine_of(cluster, work)
    planned = memory.estimate(recipe, model)
    fits = planned.peak_bytes <= machine.memory_bytes
    speed = _speed(recipe, cluster, model, work, machine)
    return {
        "name": recipe.name,
        "engine": recipe.engine.name,
        "regime": recipe.precision.regime,
        "device": cluster.device,
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
        "ranks": ranks,
        "parameters": planned.parameters,
        "tokens_per_step": work.tokens * work.micro_batches * ranks,
        "memory": {
            "bytes_per_rank": planned.peak_bytes,
            "device_bytes": machine.memory_bytes,
            "host_bytes": planned.host_bytes,
            "fits": fits,
        },
        **(speed if fits else dict.fromkeys(speed)),
        "assumptions": [
            f"engine.ranks is {ranks:,}, the devices of the cluster",
            *machine.assumptions,
            *_own_assumptions(work, machine.nodes),
            *_ASSUMED,
        ],
    }


def _speed(recipe: Recipe, cluster: Cluster, model: nn.Module, work: Work, machine: Machine) -> dict[str, Any]:
    costs = Costs(work, machine)
    step = costs.step()
    seconds = step.overlapped
    without = costs.if_free()
    tokens = work.tokens * work.micro_batches / seconds
    decoder, length = Decoder.of(model), recipe.data.max_tokens
    causal = model_flops(decoder, [length], "causal") / length
    done = sum(u.forward + u.backward for u in work.units) * work.micro_batches
    return {
        "step_seconds": seconds,
        "step_seconds_without_overlap": step.serial,
        "seconds": costs.parts(),
        "limited_by": min(without, key=lambda resource: without[resource]),
        "step_seconds_if_free": without,
        "tokens_per_second_per_device": tokens,
        "tokens_per_second_per_device_range": [tokens * share for share in REACHED],
        "tokens_per_second": tokens * machine.ranks,
        "mfu": {
            "6N": mfu(six_n(decoder), tokens, machine.peak_flops),
            "6W+attention, causal": mfu(causal, tokens, machine.peak_flops),
            "hardware": done / seconds / machine.peak_flops,
        },
        "cost": _cost(recipe, cluster, seconds, tokens, machine.ranks),
    }


def _cost(recipe: Recipe, cluster: Cluster, seconds: float, tokens: float, ranks: int) -> dict[str, Any]:
    """In the currency of the price. None where there is no price, or for the run no number of steps."""
    steps, price = recipe.train.steps, cluster.price_per_device_hour
    hours = None if steps is None else steps * seconds / 3600
    return {
        "price_per_device_hour": price,
        "per_million_tokens": None if price is None else price / 3600 / tokens * 1e6,
        "per_step": None if price is None else price / 3600 * seconds * ranks,
        "steps": steps,
        "run_hours": hours,
        "run": None if price is None or hours is None else price * hours * ranks,
    }


def _own_assumptions(work: Work, nodes: int) -> list[str]:
    """What follows from the recipe's own settings."""
    texts = []
    if work.compute == torch.float32:
        texts.append("float32 is multiplied outside of tensor cores, without TF32")
    if work.tree and nodes > 1:
        texts.append(
            "engine.reduce_order tree is an all-to-all: gradients cross the network once for every device of a node, "
            "where those of backend, a ring, cross it once for the node"
        )
    if work.engine in ("zero1", "zero2"):
        texts.append(
            f"{work.engine} reduces after the backward pass and gathers the new weights after the step: no overlap"
        )
    if work.engine == "zero3":
        texts.append(
            "zero3 gathers the weights of blocks twice per micro-batch, whatever engine.live_elements would keep"
        )
    if work.offloaded.optimizer:
        texts.append("the optimizer on the host is as fast as its memory")
    return texts
