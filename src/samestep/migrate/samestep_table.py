"""The fields of a recipe as rows, and what each target says about those that it has no place for."""

from __future__ import annotations

from typing import Any

from samestep.migrate.rows import Row, Status, Table
from samestep.migrate.values import Values
from samestep.recipe.fields import field_paths, sections_of
from samestep.recipe.schema import Recipe

_TOPICS = {"engine.offload": "offload", "engine": "sharding", "precision": "precision",
           "train.max_grad_norm": "clipping",
           "train.accumulation": "accumulation", "train.micro_batch": "accumulation", "train.optimizer": "optimizer",
           "train.schedule": "schedule", "checkpoint": "checkpointing"}  # fmt: skip
# Fields that hold one value, whatever is inside.
_WHOLE = ("model.lora", "model.config", "data.path", "data.columns", "engine.offload")

_SCRIPT = "the training script decides it"
_ENGINE: dict[str, tuple[Status, str]] = {
    "engine.reduce_every": ("lossy", "the tool decides when gradients cross the ranks: last bits"),
    "engine.reduce_order": ("lossy", "the communication library decides the order of sums: last bits"),
    "engine.forward_prefetch": ("not-needed", "speed only"),
    "engine.backward_prefetch": ("not-needed", "speed only"),
    "engine.threads": ("not-needed", "OMP_NUM_THREADS, for the launcher"),
    "engine.timeout_seconds": ("not-needed", "given where the script starts its ranks"),
    "engine.unit_classes": ("not-needed", "the tool finds its own units"),
    "engine.ignored_modules": ("not-needed", "no module is ignored"),
    "engine.bucket_elements": ("not-needed", "speed and memory only"),
    "engine.prefetch_elements": ("not-needed", "speed and memory only"),
    "engine.live_elements": ("not-needed", "speed and memory only"),
    "engine.persistent_elements": ("not-needed", "speed and memory only"),
    "engine.reshard_after_forward": ("not-needed", "nothing is sharded that could be resharded"),
    "engine.shard_ranks": ("not-needed", "no groups"),
    "engine.offload": ("not-needed", "nothing is offloaded"),
}

# What the script must do itself, where a recipe asks for it.
_BY_HAND = {
    "train.activation_checkpointing": "the script must call model.gradient_checkpointing_enable()",
    "model.lora": "the script must add the adapters",
    "model.freeze": "the script must freeze the parameters",
}


def samestep_table() -> Table:
    """One row for every field of a recipe that is not a section of others."""
    rows = []
    for path, info in field_paths(Recipe):
        name = ".".join(map(str, path))
        inside = any(name.startswith(f"{whole}.") for whole in _WHOLE)
        if inside or (sections_of(info.rebuild_annotation()) and name not in _WHOLE):
            continue
        topic = next((_TOPICS[key] for key in _TOPICS if name == key or name.startswith(f"{key}.")), "other")
        rows.append(Row(name, "any", "kept", "a field of the recipe", to=name, topic=topic))
    return Table("samestep", rows)


def read_samestep(v: Values, resolved: dict[str, Any]) -> None:
    """Every field of the resolved recipe says itself."""
    for row in v.table:
        if row.path in resolved:
            v.say(row.path, resolved[row.path], row.path, rule="", status="kept")


def unsaid(target: str, said: dict[str, Any]) -> dict[str, tuple[Status, str]]:
    """For a target: recipe fields that it has no place for, with the reason; a writer's own word comes first."""
    if target == "samestep":
        return {}
    reasons: dict[str, tuple[Status, str]] = {row.path: ("not-needed", _SCRIPT) for row in samestep_table()}
    reasons |= _ENGINE
    if said.get("train.accumulation", 1) == 1:
        reasons["engine.reduce_every"] = ("not-needed", "one micro-batch a step")
    for path, rule in _BY_HAND.items():
        if said.get(path):
            reasons[path] = ("lossy", rule)
    return reasons
