"""Jobs of test_memory.py."""

from __future__ import annotations

from benchmarks.bytes_per_parameter import measure, recipe_for
from samestep import world


def live_bytes(cases: list[tuple[str, str, str, tuple[str, ...]]]) -> list[dict[str, int]]:
    """Bytes of this rank's live tensors for each (engine, regime, config, settings)."""
    here = world.start(timeout_seconds=60)
    return [
        measure(recipe_for(engine, regime, here.size, config=config, settings=settings), here)
        for engine, regime, config, settings in cases
    ]
