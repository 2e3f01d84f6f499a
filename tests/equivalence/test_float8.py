"""Float8 matmuls, emulated on the CPU: equal bits on every engine, and the planned layers observed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samestep import models, world
from samestep.engines import build
from samestep.recipe.schema import Recipe
from tests.equivalence.cases import ENGINES, SHARDED, make_examples, make_recipe
from tests.equivalence.precision_jobs import FLOAT8_FAULTS, spoiled
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
    "adapters": {"model__lora": {"rank": 16, "target_modules": ["q_proj", "down_proj"]}},
}

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("engine", SHARDED)
def test_equal_bits_on_every_engine(run, model_folder, engine, variant):
    """Losses, norms and weights are those of `single` running both ranks' micro-batches; the plan holds."""
    if variant == "adapters":
        pytest.importorskip("peft")
    changes = SETTINGS | VARIANTS[variant]
    folder = model_folder(**MODEL)
    arguments: dict[str, Any] = {"held_out": HELD_OUT, "measure": True}
    single = run(make_recipe("single", folder, regime="mixed-fp8", steps=6, **changes), EXAMPLES, **arguments)
    other = run(make_recipe(engine, folder, regime="mixed-fp8", steps=6, **changes), EXAMPLES, **arguments)
    assert first_difference(single, other) is None
    assert len({step.loss for step in single.steps}) == 6


def test_scalings_and_regimes_differ(run, model_folder):
    """Equal bits are not for want of float8: every scaling, and `mixed`, goes another way from the first loss on."""
    scalings = [{"precision__fp8__scaling": name} for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")]
    folder = model_folder(**MODEL)
    runs = [run(make_recipe("single", folder, regime="mixed-fp8", **SETTINGS, **each), EXAMPLES) for each in scalings]
    runs.append(run(make_recipe("single", folder, **SETTINGS), EXAMPLES))
    assert len({each.steps[1].grad_norm for each in runs}) == 4
    assert len({each.steps[0].loss for each in runs}) == 3  # rowwise_with_gw_hp differs in the backward pass only
    assert max(each.steps[0].loss for each in runs) - min(each.steps[0].loss for each in runs) < 0.05


@pytest.mark.parametrize("engine", ENGINES)
def test_a_layer_that_breaks_the_plan_is_named(ranks, model_folder, engine):
    recipe = make_recipe(engine, model_folder(**MODEL), regime="mixed-fp8", precision__fp8__emulate=True)
    expected = {
        "a layer left out": "layer model.layers.0.self_attn.q_proj: planned float8_e4m3fn, observed bfloat16",
        "a layer too many": "layer lm_head: planned bfloat16, observed float8_e4m3fn",
    }
    for fault in FLOAT8_FAULTS:
        for found in ranks.run(1 if engine == "single" else 2, spoiled, recipe=recipe, fault=fault, examples=EXAMPLES):
            assert found == [("float8", expected[fault])]


def bytes_kept(recipe: dict[str, Any]) -> list[int]:
    """A job: the storage sizes, after a forward pass, of what float8 layers keep of their weights for the backward."""
    checked = Recipe.model_validate(recipe)
    model = models.load_model(checked.model, seed=0)
    plan = build.resolve_plan(checked, model)
    shapes = {tuple(model.get_parameter(f"{name}.weight").shape) for name in plan.float8.names}
    engine = build.build(checked, model, plan, world.start(timeout_seconds=60))
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = engine.model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False).logits
        assert output.requires_grad and len(kept) > len(plan.float8.names)
        matrices = [t for t in kept if tuple(t.shape) in shapes or tuple(t.shape[::-1]) in shapes]
        return [t.untyped_storage().nbytes() for t in matrices]
    finally:
        engine.close()


@pytest.mark.parametrize("engine", ["single", "fsdp", "zero3"])
def test_gathered_weights_are_not_kept_for_the_backward_pass(ranks, model_folder, engine):
    """What torchao keeps of a weight, a transposed view, would stay gathered under ZeRO-3."""
    recipe = make_recipe(engine, model_folder(**MODEL), regime="mixed-fp8", precision__fp8__emulate=True)
    for sizes in ranks.run(1 if engine == "single" else 2, bytes_kept, recipe=recipe):
        assert not any(sizes), sizes
