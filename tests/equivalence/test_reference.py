"""`single` against an independent plain-torch loop. The other engines are then compared with `single`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.recipe.schema import Recipe
from tests.equivalence import reference
from tests.equivalence.cases import make_examples, make_recipe
from tests.equivalence.trajectories import digest_of, loader_of

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = {
    "full": {"master": FP32, "compute": FP32, "reduce": FP32},
    "mixed": {"master": FP32, "compute": BF16, "reduce": FP32},
    "low": {"master": BF16, "compute": BF16, "reduce": BF16},
}

pytestmark = pytest.mark.timeout(180)


def batches_of(recipe: dict[str, Any], examples: Any) -> list[list[list[tuple[torch.Tensor, torch.Tensor]]]]:
    """What every rank gets in every micro-batch of every step."""
    checked = Recipe.model_validate(recipe)
    loader = loader_of(checked, examples)
    assert checked.train.steps is not None
    steps = [loader.step(index) for index in range(checked.train.steps)]
    batches = [
        [[step.batch(micro, rank) for rank in range(checked.engine.ranks)] for micro in range(step.micro_steps)]
        for step in steps
    ]
    return [[[(b.input_ids, b.labels) for b in micro] for micro in step] for step in batches]


def check(run, ranks, recipe: dict[str, Any], examples: Any, *, windows: set[int]) -> None:
    """Fails with the first step and quantity in which `single` is not the reference."""
    checked = Recipe.model_validate(recipe)
    batches = batches_of(recipe, examples)
    assert {len(window) for window in batches} == windows
    (expected,) = ranks.run(
        1,
        reference.train,
        path=checked.model.path,
        batches=batches,
        lr=checked.train.optimizer.lr,
        warmup=checked.train.schedule.warmup_steps,
        decay=checked.train.optimizer.weight_decay,
        max_norm=checked.train.max_grad_norm,
        every=checked.engine.reduce_every,
        **DTYPES[checked.precision.regime],
    )
    single = run(recipe, examples)
    for index, (step, (loss, norm, clipped, masters)) in enumerate(zip(single.steps, expected, strict=True)):
        assert (step.loss, step.grad_norm, step.grad_norm_clipped) == (loss, norm, clipped), f"step {index + 1}"
        assert not step.skipped
        assert step.digests.keys() == masters.keys()
        differing = [name for name, tensor in masters.items() if step.digests[name] != digest_of(tensor)]
        assert differing == [], f"step {index + 1}"
    for name, tensor in expected[-1][3].items():
        assert torch.equal(single.masters[name], tensor), name


@pytest.mark.parametrize("max_grad_norm", [None, 2.5, 1e-4])
@pytest.mark.parametrize("regime", ["full", "mixed", "low"])
def test_accumulation_with_a_short_last_window(run, ranks, model_folder, regime, max_grad_norm):
    """30 rows, 12 a step: windows of 3, 3 and 2 micro-batches, the last with one idle rank."""
    changes = {"train__accumulation": 3, "train__max_grad_norm": max_grad_norm}
    recipe = make_recipe("single", model_folder(), regime=regime, steps=6, **changes)
    check(run, ranks, recipe, make_examples(30), windows={3, 2})


@pytest.mark.parametrize("regime", ["full", "mixed", "low"])
def test_reduction_once_per_step(run, ranks, model_folder, regime):
    changes = {"train__accumulation": 3, "engine__reduce_every": "step"}
    recipe = make_recipe("single", model_folder(), regime=regime, steps=4, **changes)
    check(run, ranks, recipe, make_examples(30), windows={3, 2})


@pytest.mark.parametrize("count", [1, 3, 4, 5])
@pytest.mark.parametrize("regime", ["mixed", "low"])
def test_other_numbers_of_ranks(run, ranks, model_folder, regime, count):
    recipe = make_recipe("single", model_folder(), regime=regime, steps=3, engine__ranks=count)
    check(run, ranks, recipe, make_examples(30), windows={1})


@pytest.mark.parametrize("regime", ["full", "mixed", "low"])
def test_forty_steps_untied_from_bf16(run, ranks, model_folder, regime):
    folder = model_folder(tie_word_embeddings=False, dtype=BF16)
    check(run, ranks, make_recipe("single", folder, regime=regime, steps=40), make_examples(103), windows={1})


def test_the_reference_is_short_and_knows_nothing_of_the_product():
    source = Path(reference.__file__).read_text(encoding="utf-8")
    imports = [line for line in source.splitlines() if line.startswith(("import", "from"))]
    assert imports and not any("samestep" in line or "tests" in line for line in imports)
    loop = source[source.index("def train") :]
    assert sum(bool(line.strip()) for line in loop.splitlines()) <= 60
