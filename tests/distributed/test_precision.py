"""What the ranks really do with dtypes: the table of regimes by observation, every broken role found by its name, and
exports that keep what training did."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.equivalence.cases import ENGINES, make_examples, make_recipe, save_model
from tests.equivalence.precision_jobs import FAULTS, observed, spoiled

if TYPE_CHECKING:
    from tests.distributed.ranks import RankPools

BF16, FP32 = torch.bfloat16, torch.float32
VERIFIED = tuple(engine for engine in ENGINES if engine != "hsdp")  # fsdp and ddp at once
EXAMPLES = make_examples(8)
TABLE = {  # master, compute, gradient, reduce, moments; the output is in the compute dtype
    "full": (FP32, FP32, FP32, FP32, FP32),
    "mixed": (FP32, BF16, FP32, FP32, FP32),
    "mixed-stochastic": (FP32, BF16, FP32, FP32, FP32),
    "low": (BF16, BF16, BF16, BF16, BF16),
    "low-stochastic": (BF16, BF16, BF16, BF16, BF16),
    "low-kahan": (BF16, BF16, BF16, BF16, BF16),
}

pytestmark = pytest.mark.timeout(120)


def size_of(engine: str) -> int:
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed")
    return 1 if engine == "single" else 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Stored in bf16, with fp32 rotary frequencies, as transformers makes them."""
    return save_model(tmp_path_factory.mktemp("model"), dtype=BF16)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_table_of_regimes_by_observation(ranks: RankPools, model: str, engine: str) -> None:
    """P10, P11: one name, one set of dtypes, on every engine; read from tensors and collectives."""
    recipe = make_recipe(engine, model, train__accumulation=2, train__micro_batch=1)
    regimes = list(TABLE)
    for found in ranks.run(size_of(engine), observed, recipe=recipe, regimes=regimes, examples=EXAMPLES):
        for regime, (facts, broken) in zip(regimes, found, strict=True):
            assert broken == [], regime
            roles = ("master", "compute", "gradient", "reduce", "moments")
            expected = dict(zip(roles, TABLE[regime], strict=True))
            for role, dtype in expected.items():
                if role == "reduce" and engine == "single":
                    continue  # one process: nothing to send
                assert facts.roles[role] == (dtype,), (regime, role)
            assert facts.roles["output"] == (expected["compute"],)
            assert facts.buffers and set(facts.buffers.values()) == {FP32}


SPOILED = {  # what must be named, in the regime mixed
    "reduces in bf16": {"reduce"},
    "computes in fp32": {"compute", "output"},
    "masters in bf16": {"master", "gradient", "moments"},
    "a bf16 moment": {"moments"},
    "bf16 gradients": {"gradient"},
    "buffers cast": {"buffer"},
    "output cast": {"output"},
    "frozen parameters cast": {"frozen"},
}


@pytest.mark.parametrize("fault", SPOILED)
@pytest.mark.parametrize("engine", VERIFIED)
def test_a_broken_role_is_named(ranks: RankPools, model: str, engine: str, fault: str) -> None:
    assert set(SPOILED) == set(FAULTS)
    if engine == "single" and fault == "reduces in bf16":
        pytest.skip("single sends nothing")
    freeze = ["model.layers.0.*"] if fault == "frozen parameters cast" else []
    recipe = make_recipe(engine, model, train__max_grad_norm=None, model__freeze=freeze)
    for found in ranks.run(size_of(engine), spoiled, recipe=recipe, fault=fault, examples=EXAMPLES):
        assert {role for role, _ in found} == SPOILED[fault], found
        for role, text in found:
            assert (role if role != "buffer" else "inv_freq") in text
            assert "planned" in text
            assert "observed" in text
