"""Float8 matmuls, emulated on the CPU: equal bits on every engine, and the planned layers observed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.equivalence.cases import SHARDED, make_examples, make_recipe
from tests.equivalence.trajectories import first_difference

pytest.importorskip("torchao", reason="mixed-fp8 needs torchao, the extra samestep[fp8]")

EXAMPLES = make_examples(30)  # windows of 3 micro-batches of 2 rows on 2 ranks: full, full, short with an idle rank
HELD_OUT = make_examples(7, seed=5)
# Biases, and keys and values of 24 rows, which float8 hardware does not take.
MODEL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "attention_bias": True,
}
SETTINGS: dict[str, Any] = {"train__accumulation": 3, "train__max_grad_norm": 1.6, "precision__fp8__emulate": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "tensorwise": {},
    "bf16 masters": {"precision__fp8__master": "bfloat16"},
    "rowwise, checkpointed": {"precision__fp8__scaling": "rowwise", "train__activation_checkpointing": True},
    "rowwise_with_gw_hp": {"precision__fp8__scaling": "rowwise_with_gw_hp"},
}

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("engine", SHARDED)
def test_equal_bits_on_every_engine(run, model_folder, engine, variant):
    """Losses, norms and weights are those of `single` running both ranks' micro-batches; the plan holds."""
    changes = SETTINGS | VARIANTS[variant]
    folder = model_folder(**MODEL)
    arguments: dict[str, Any] = {"held_out": HELD_OUT, "measure": True}
    single = run(make_recipe("single", folder, regime="mixed-fp8", steps=6, **changes), EXAMPLES, **arguments)
    other = run(make_recipe(engine, folder, regime="mixed-fp8", steps=6, **changes), EXAMPLES, **arguments)
    assert first_difference(single, other) is None
    assert len({step.loss for step in single.steps}) == 6
