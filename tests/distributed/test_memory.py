"""Bytes of live tensors on real ranks, against what the plan says without them."""

from __future__ import annotations

import pytest

from benchmarks.bytes_per_parameter import planned, recipe_for
from tests.distributed import memory_jobs

CONFIG = (
    "{model_type: llama, vocab_size: 256, hidden_size: 64, intermediate_size: 136, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, tie_word_embeddings: false}"
)
REGIMES = ("full", "mixed", "mixed-stochastic", "low", "low-stochastic", "low-kahan")
ENGINES = ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")

pytestmark = pytest.mark.timeout(600)


def cases(engine: str) -> list[tuple[str, str, str, tuple[str, ...]]]:
    # Smaller than the gradients are together: a bucket that is filled several times.
    settings = ("engine.bucket_elements=20000",) if engine.startswith("zero") else ()
    freeze = (*settings, "model.freeze=[model.embed_tokens.*]")
    # By default the bucket takes all gradients at once, however few they are.
    default = [(engine, "mixed", CONFIG, ())] if settings else []
    return [
        *((engine, regime, CONFIG, settings) for regime in REGIMES),
        (engine, "mixed", CONFIG, freeze),
        *default,
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_live_bytes_are_the_planned_ones(ranks, engine):
    """P110: Estimates knew no stage 1, counted whole gradients in stage 2, and one dtype only."""
    listed = cases(engine)
    measured = ranks.run(2, memory_jobs.live_bytes, cases=listed, timeout_seconds=300.0)
    for index, (name, regime, config, settings) in enumerate(listed):
        plan = planned(recipe_for(name, regime, 2, config=config, settings=settings))
        for moment in ("after_step", "after_backward"):
            largest = max(rank[index][moment] for rank in measured)
            wanted = getattr(plan, f"{moment}_bytes")
            assert largest == pytest.approx(wanted, rel=0.05), (regime, settings, moment)


def test_one_process_that_emulates_ranks(ranks):
    listed = cases("single")
    (measured,) = ranks.run(1, memory_jobs.live_bytes, cases=listed, timeout_seconds=300.0)
    for found, (name, regime, config, settings) in zip(measured, listed, strict=True):
        plan = planned(recipe_for(name, regime, 1, config=config, settings=settings))
        assert found["after_step"] == pytest.approx(plan.after_step_bytes, rel=0.05), regime
        assert found["after_backward"] == pytest.approx(plan.after_backward_bytes, rel=0.05), regime
