"""A run saved on one engine goes on, on any engine at any number of ranks.

On the same number of ranks every bit is that of a run which was never saved or stopped. With another number the micro-
batches are cut in another way, so that sums have other last bits; what was loaded is equal by value all the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.equivalence.cases import ENGINES, make_examples, make_recipe
from tests.equivalence.trajectories import Trajectory, first_difference, rest_of

ROWS = make_examples(22)  # 4 rows a step: an epoch is 5 steps and a short one
STEPS, SAVED = 8, 3
REGIMES = ("full", "mixed", "low", "low-kahan", "low-stochastic", "mixed-stochastic")
BF16 = torch.bfloat16

pytestmark = pytest.mark.timeout(240)


def recipe_of(engine: str, model: str, regime: str, *, ranks: int = 2, **changes: Any) -> dict[str, Any]:
    """4 rows a step on 1, 2 and 4 ranks, and a checkpoint after step 3."""
    shape = {"engine__ranks": ranks, "train__micro_batch": 4 // ranks, "checkpoint__every": SAVED}
    return make_recipe(engine, model, regime=regime, steps=STEPS, **(shape | {"checkpoint__keep": 9} | changes))


@pytest.fixture(scope="module")
def saved(run: Any, model_folder: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Gives the run of an engine that saved after steps 3 and 6, and its folder; made once."""
    kept: dict[tuple[str, str, int], tuple[Trajectory, Path]] = {}

    def go(engine: str, regime: str, ranks: int = 2) -> tuple[Trajectory, Path]:
        key = engine, regime, ranks
        if key not in kept:
            out = tmp_path_factory.mktemp("run")
            model = model_folder(attention_dropout=0.2)
            recipe = recipe_of(engine, model, regime, ranks=ranks)
            kept[key] = run(recipe, ROWS, save=str(out)), out / "checkpoints" / "step-00000003"
        return kept[key]

    return go


@pytest.mark.parametrize("regime", ["mixed", "low-kahan"])
@pytest.mark.parametrize("engine", ENGINES)
def test_saving_changes_nothing(run, saved, model_folder, engine, regime):
    never = run(recipe_of("single", model_folder(attention_dropout=0.2), regime), ROWS)
    assert first_difference(never, saved(engine, regime)[0]) is None


# benchmarks/resume_matrix.py has all of them, at all numbers of ranks.
HALF = [(e, r) for i, e in enumerate(ENGINES) for k, r in enumerate(REGIMES) if (i + k) % 2 == 0]


@pytest.mark.parametrize(("engine", "regime"), HALF)
def test_goes_on_bit_for_bit_on_any_engine(run, saved, model_folder, engine, regime):
    """Each engine takes up what another one saved, over the end of the epoch, with dropout and a schedule."""
    writer = ENGINES[(ENGINES.index(engine) + REGIMES.index(regime)) % len(ENGINES)]
    whole, folder = saved(writer, regime)
    resumed = run(recipe_of(engine, model_folder(attention_dropout=0.2), regime), ROWS, resume=str(folder))
    assert resumed.states[SAVED] == whole.states[SAVED]
    assert len(resumed.steps) == STEPS - SAVED
    assert first_difference(rest_of(whole, SAVED), resumed) is None


SIZES = ((1, 4), (4, 2), (2, 1))
CHANGED = [(i, sizes) for k, sizes in enumerate(SIZES) for i in range(len(ENGINES)) if (i + k) % 2 == 0]


@pytest.mark.parametrize(
    ("writer", "reader", "wrote", "reads"), [(ENGINES[i], ENGINES[(i + 3) % 7], *sizes) for i, sizes in CHANGED]
)
def test_at_another_number_of_ranks(run, saved, model_folder, writer, reader, wrote, reads):
    regime = REGIMES[(ENGINES.index(writer) + wrote) % len(REGIMES)]
    if (wrote == 1 and writer == "hsdp") or (reads == 1 and reader == "hsdp"):
        pytest.skip("hsdp needs two ranks")
    whole, folder = saved(writer, regime, wrote)
    recipe = recipe_of(reader, model_folder(attention_dropout=0.2), regime, ranks=reads)
    resumed = run(recipe, ROWS, resume=str(folder))
    assert resumed.states[SAVED] == whole.states[SAVED]
    assert resumed.start == whole.steps[SAVED - 1].digests
    for ours, theirs in zip(resumed.steps, whole.steps[SAVED:], strict=True):
        assert ours.lr == theirs.lr
        # Dropout differs with the cut into ranks; without it only last bits would.
        assert ours.loss == pytest.approx(theirs.loss, rel=0.05)


VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {"model": {"tie_word_embeddings": False}},
    "frozen": {"changes": {"model__freeze": ["model.embed_tokens.*", "*norm*"]}},
    "adapters on bf16": {
        "model": {"dtype": BF16},
        "changes": {"model__lora": {"rank": 3, "alpha": 5.0, "target_modules": ["q_proj", "down_proj"]}},
    },
    "packed": {"rows": make_examples(30, packed=True)},
    "sgd": {"changes": {"train__optimizer": {"name": "sgd", "lr": 0.3, "momentum": 0.9}}},
    "accumulated": {"changes": {"train__accumulation": 3}},
    "offload": {"changes": {"engine__offload": "cpu"}, "engines": ("fsdp", "zero2", "zero3")},
    "fp16": {
        "changes": {
            "precision__low_dtype": "float16",
            "precision__loss_scale": {"initial": 2.0**40, "growth_interval": 2},
        }
    },
    "asynchronous": {"changes": {"checkpoint__asynchronous": True}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(run, model_folder, tmp_path, name):
    """What recipes can ask for: saved on one engine after every step, taken up on another one after the third."""
    variant = VARIANTS[name]
    model, rows = model_folder(**variant.get("model", {})), variant.get("rows", ROWS)
    engines = variant.get("engines", ("fsdp", "zero3", "hsdp", "zero1"))
    changes = {"checkpoint__every": 1} | variant.get("changes", {})
    first = list(VARIANTS).index(name) % 2
    for writer, reader in ((engines[first], engines[first + 1]), (engines[-1], engines[0])):
        out = tmp_path / writer
        whole = run(recipe_of(writer, model, "mixed", **changes), rows, save=str(out))
        resumed = run(
            recipe_of(reader, model, "mixed", **changes), rows, resume=str(out / "checkpoints" / "step-00000003")
        )
        assert resumed.states[SAVED] == whole.states[SAVED]
        assert first_difference(rest_of(whole, SAVED), resumed) is None
