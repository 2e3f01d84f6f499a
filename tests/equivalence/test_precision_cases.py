"""Faults of precision that users of such tools reported, each with the right value: rows of the same collection as in
test_cases.py, on models so small that most values are known without a computation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.bytes_per_parameter import planned, recipe_for
from samestep import models, world
from samestep.engines import build, loading
from samestep.recipe.schema import Recipe
from samestep.training.monitor import Monitor
from tests.distributed.loading_jobs import buffers
from tests.distributed.memory_jobs import live_bytes
from tests.equivalence.against_reference import BF16, check_equal, reference_run
from tests.equivalence.cases import ENGINES, VOCABULARY, make_examples, make_recipe
from tests.equivalence.precision_jobs import optimizer_of
from tests.equivalence.toys import Weights, accumulated
from tests.equivalence.trajectories import Trajectory, digest_of, first_difference

FP32 = torch.float32
EXAMPLES = make_examples(30)

pytestmark = pytest.mark.timeout(120)


def size_of(engine: str) -> int:
    return 1 if engine == "single" else 2


def toy_recipe(engine: str, regime: str = "mixed", **optimizer: Any) -> dict[str, Any]:
    """A recipe of a constant rate for a model that the job makes."""
    settings = {"lr": 1e-3} | optimizer
    return make_recipe(engine, "unused", regime=regime, train__optimizer=settings, train__max_grad_norm=None)


def toy_steps(recipe: dict[str, Any], factor: float, steps: int, dtype: torch.dtype = FP32) -> dict[str, Any]:
    """A job: steps on weights of one, loaded in `dtype`, whose gradient is `factor` on every rank; what the optimizer
    is and holds then, and what the monitor saw in the last step."""
    checked, here, model = Recipe.model_validate(recipe), world.start(timeout_seconds=60), Weights(4, 6).to(dtype)
    plan = build.resolve_plan(checked, model)
    engine = build.build(checked, model, plan, here)
    try:
        monitor, lr = Monitor(engine, checked, plan, here), checked.train.optimizer.lr
        shares = None
        for _ in range(steps):
            for turn in engine.turns(1):
                engine.backward(engine.model(torch.tensor(factor, dtype=plan.compute)), turn, 1)
            before = monitor.before(engine.gradients())
            engine.apply(lr)
            shares = monitor.after(before, lr=lr)
        optimizer = optimizer_of(engine)
        # ZeRO-3 gives its optimizer the parameters for the time of a step; the state keeps them.
        held = [*optimizer.state, *(p for group in optimizer.param_groups for p in group["params"])]
        states = [s for state in optimizer.state.values() for s in state.items() if s[0] != "step"]
        return {
            "weights": sorted({value for shard in engine.masters() for value in shard.values.tolist()}),
            "optimizer": type(optimizer).__name__,
            "from": type(optimizer).__module__.partition(".")[0],
            "held": {tensor.dtype for tensor in held},
            "states": {key: value.dtype for key, value in states if torch.is_tensor(value)},
            "shares": shares,
        }
    finally:
        engine.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_p02_the_optimizer_holds_what_the_regime_says(ranks, engine):
    """P02: The upcast was announced and not made. Read from the optimizer itself; under low the masters stay bf16."""
    for regime, dtype in (("mixed", FP32), ("low", BF16)):
        for found in ranks.run(
            size_of(engine), toy_steps, recipe=toy_recipe(engine, regime), factor=1.0, steps=1, dtype=BF16
        ):
            assert found["held"] == {dtype}
            assert found["states"] == {"exp_avg": dtype, "exp_avg_sq": dtype}


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp", "hsdp"])
def test_p03_a_wider_reduction_does_not_widen_the_moments(ranks, engine):
    """P03: AdamW took bf16 from the parameters although gradients were reduced in fp32. That is what low means, and
    says; mixed gives fp32 moments, however gradients are reduced."""
    for regime, reduce, dtype in (("low", "float32", BF16), ("mixed", "bfloat16", FP32)):
        recipe = toy_recipe(engine, regime)
        recipe["precision"]["overrides"] = {"reduce": reduce}
        for found in ranks.run(size_of(engine), toy_steps, recipe=recipe, factor=1.0, steps=1, dtype=BF16):
            assert found["held"] == {dtype}
            assert found["states"] == {"exp_avg": dtype, "exp_avg_sq": dtype}


@pytest.mark.parametrize("engine", ["ddp", "zero2"])
def test_p04_from_a_bf16_model_both_backends_take_the_steps_of_fp32_masters(run, ranks, model_folder, engine):
    """P04: a change from ZeRO-2 to DDP alone was the difference between 94 % and 0 %: DDP ran Adam over bf16. In bits
    those of a plain loop with fp32 masters, which is not that of a plain loop in bf16."""
    folder = model_folder(dtype=BF16)
    expected = reference_run(ranks, make_recipe("single", folder), EXAMPLES)
    check_equal(run(make_recipe(engine, folder), EXAMPLES), expected)
    low = reference_run(ranks, make_recipe("single", folder, regime="low"), EXAMPLES)
    assert all(not torch.equal(low[-1][3][name].float(), tensor) for name, tensor in expected[-1][3].items())


@pytest.mark.parametrize("engine", ENGINES)
def test_p52_the_first_update_is_the_rate(ranks, engine):
    """P52: a step made to create the state counted as the first, and the first update was 1.34 times too small.
    AdamW's first is lr * g / (|g| + eps)."""
    for regime in ("full", "mixed"):
        for found in ranks.run(size_of(engine), toy_steps, recipe=toy_recipe(engine, regime), factor=0.5, steps=1):
            (weight,) = found["weights"]
            assert 1 - weight == pytest.approx(1e-3, rel=1e-4)


def travel(run: Trajectory, start: dict[str, torch.Tensor]) -> torch.Tensor:
    """How far every weight has moved, in fp64, all parameters one after the other."""
    moved = [run.masters[name].double() - start[name].double() for name in sorted(start)]
    return torch.cat([tensor.reshape(-1) for tensor in moved])


def weights_of(folder: str) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def held_out_loss(folder: str, weights: dict[str, torch.Tensor] | None) -> float:
    """By transformers alone, in fp32: the mean loss over the label tokens of HELD_OUT, of these weights or the stored
    ones."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=FP32)
    if weights is not None:
        for name, parameter in model.named_parameters():
            parameter.data = weights[name].float()
    losses, count = 0.0, 0
    for low, high in zip(HELD_OUT.row_starts[:-1], HELD_OUT.row_starts[1:], strict=True):
        row, counts = torch.from_numpy(HELD_OUT.tokens[low:high]).long(), torch.from_numpy(HELD_OUT.counts[low:high])
        with torch.no_grad():
            logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        each = nn.functional.cross_entropy(logits, row[1:], reduction="none")
        losses, count = losses + each[counts[1:]].sum().item(), count + int(counts[1:].sum())
    return losses / count


HELD_OUT = make_examples(8, seed=6)
FINE: dict[str, Any] = {
    "train__optimizer": {"lr": 3e-4, "weight_decay": 0.0},
    "train__schedule": {"name": "linear"},
    "train__max_grad_norm": None,
}


def test_p05_what_fine_tuning_gains_does_not_depend_on_the_engine(run, ranks, model_folder):
    """P05: Fine-tuning from bf16 weights failed on one engine. Held-out loss falls as in plain fp32 training, and by
    less than half of that where masters stay bf16, as they did there."""
    folder = model_folder(dtype=BF16, initializer_range=0.2)
    changes = FINE | {"steps": 40}
    plain = reference_run(ranks, make_recipe("single", folder, regime="full", **changes), EXAMPLES)
    right = held_out_loss(folder, None) - held_out_loss(folder, plain[-1][3])
    runs = [run(make_recipe(name, folder, **changes), EXAMPLES, held_out=HELD_OUT) for name in ("fsdp", "zero2")]
    assert first_difference(*runs) is None
    low = run(make_recipe("single", folder, regime="low", **changes), EXAMPLES, held_out=HELD_OUT)
    gains = [each.evaluations[0] - each.evaluations[1] for each in (*runs, low)]
    assert gains[0] == pytest.approx(right, rel=0.1)
    assert gains[2] < right / 2


def test_p08_a_rate_of_6e_7_needs_masters_or_stochastic_rounding(run, model_folder):
    """P08: Training in bf16 stood still at 6e-7. Along the way that fp32 masters go, stochastic rounding gets as far on
    average, rounding to nearest hardly anywhere."""
    folder = model_folder(dtype=BF16)
    changes = FINE | {"train__optimizer": {"lr": 6e-7}, "steps": 12, "train__schedule": {"name": "constant"}}
    runs = {
        regime: run(make_recipe("fsdp", folder, regime=regime, **changes), EXAMPLES)
        for regime in ("mixed", "low", "low-stochastic")
    }
    start = weights_of(folder)
    way = travel(runs["mixed"], start)
    reached = {
        regime: float(torch.dot(travel(each, start), way) / torch.dot(way, way)) for regime, each in runs.items()
    }
    assert (way != 0).double().mean() > 0.99
    assert way.abs().max() <= 12 * 6e-7 * (1 + 1e-3)
    assert reached["low"] < 0.1
    # One standard deviation of the mean over these weights is about 0.04.
    assert reached["low-stochastic"] == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("engine", ["single", "fsdp", "zero2"])
def test_p09_weights_of_one_that_cannot_move_are_named(ranks, engine):
    """P09: Norm weights stayed at 1 for a whole run and nobody was told. A constant gradient, 200 steps of 1e-3."""
    for regime, weight, never_moved, lost in (("low", 1.0, ("weight",), 1.0), ("mixed", 0.8, (), 0.0)):
        for found in ranks.run(size_of(engine), toy_steps, recipe=toy_recipe(engine, regime), factor=0.5, steps=200):
            assert found["weights"] == [pytest.approx(weight, rel=1e-4)]
            assert found["shares"].never_moved == never_moved
            assert found["shares"].lost == lost


class Collectives(TorchDispatchMode):
    """Writes down what torch hands to its communication library: operator, dtype and bytes of every tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func.name().removeprefix("c10d::")
            self.seen += [(name, t.dtype, t.nbytes) for t in tree_leaves(args) if torch.is_tensor(t)]
        return func(*args, **(kwargs or {}))


def reduced(recipe: dict[str, Any], factors: list[list[float]]) -> tuple[list[float], set[torch.dtype], set[str]]:
    """A job: gradients as in `accumulated`; dtypes and operators in which anything was summed over ranks meanwhile."""
    with Collectives() as collectives:
        values = accumulated(recipe, factors)
    sums = [(name, dtype) for name, dtype, _ in collectives.seen if "reduce" in name and dtype.is_floating_point]
    return values, {dtype for _, dtype in sums}, {name for name, _ in sums}


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_p12_bf16_gradients_do_not_cross_the_ranks_in_fp16(ranks, engine):
    """P12: 1e5 is 99840 in bf16 and infinite in fp16."""
    for regime, dtype in (("low", BF16), ("mixed", FP32)):
        recipe = make_recipe(engine, "unused", regime=regime)
        for values, dtypes, _ in ranks.run(2, reduced, recipe=recipe, factors=[[1e5, 1e5]]):
            assert values == [2 * 99840.0]
            assert dtypes == {dtype}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("shard_ranks", [1, 2])
def test_p16_every_dimension_of_a_mesh_is_reduced_in_the_dtype_asked_for(ranks, shard_ranks, accumulation):
    """P16: One of two reductions stayed in bf16, without accumulation only. 256 + 1 is 257 in fp32, 256 in bf16."""
    recipe = make_recipe("hsdp", "unused", engine__shard_ranks=shard_ranks, train__accumulation=accumulation)
    for values, dtypes, names in ranks.run(2, reduced, recipe=recipe, factors=[[256.0, 1.0]] * accumulation):
        assert values == [257.0 * accumulation]
        assert dtypes == {FP32}
        assert any("allreduce" in name for name in names) is (shard_ranks == 1)


@pytest.mark.parametrize("regime", ["mixed", "low"])
def test_p14_a_thousand_ranks_add_up(ranks, regime):
    """P14: 1024 ones added one after the other in bf16 make 256, and large runs became unstable."""
    total = torch.zeros((), dtype=BF16)
    for _ in range(1024):
        total += 1
    assert total == 256
    recipe = make_recipe("single", "unused", regime=regime, engine__ranks=1024)
    assert ranks.run(1, accumulated, recipe=recipe, factors=[[1.0] * 1024]) == [[1024.0]]


class Late(nn.Module):
    """Two weights whose gradient is the factor; the second is used only when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Weights(), Weights()

    def forward(self, factor: torch.Tensor, both: bool) -> torch.Tensor:
        return self.first(factor) + self.second(factor) if both else self.first(factor)


def late_gradients(recipe: dict[str, Any], factors: list[list[float]]) -> dict[str, list[float]]:
    """A job: the gradient's values by parameter when the second weight is used in the last micro-batch alone."""
    checked, model = Recipe.model_validate(recipe), Late()
    plan = build.resolve_plan(checked, model)
    engine = build.build(checked, model, plan, world.start(timeout_seconds=60))
    try:
        for turn in engine.turns(len(factors)):
            factor = torch.tensor(factors[turn.micro][turn.rank], dtype=plan.compute)
            loss = engine.model(factor, both=turn.micro == len(factors) - 1)
            engine.backward(loss, turn, len(factors))
        named = zip(engine.masters(), engine.gradients(), strict=True)
        return {shard.name: sorted(set(gradient.tolist())) for shard, gradient in named if gradient.numel()}
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("engine", "every"),
    [
        *((engine, "micro_batch") for engine in ENGINES),
        *((engine, "step") for engine in ("single", "ddp", "fsdp", "hsdp", "zero1")),
    ],
)
def test_p17_a_weight_first_used_in_the_last_micro_batch(ranks, engine, every):
    """P17: FSDP stopped there with gradients of two dtypes. 256, 1 and 2 need fp32 for their sum."""
    recipe = make_recipe(engine, "unused", engine__reduce_every=every, train__accumulation=2)
    found: dict[str, list[float]] = {}
    for of_rank in ranks.run(size_of(engine), late_gradients, recipe=recipe, factors=[[256.0, 0.0], [1.0, 2.0]]):
        found |= of_rank
    assert found == {"first.weight": [259.0], "second.weight": [3.0]}


OPTIMIZERS: dict[str, Any] = {  # recipe's optimizer and regime: class, the package it is from, its state
    "adamw": ({}, "mixed", "AdamW", "torch", {"exp_avg": FP32, "exp_avg_sq": FP32}),
    "sgd": ({"name": "sgd", "momentum": 0.9}, "mixed", "SGD", "torch", {"momentum_buffer": FP32}),
    "kahan": (
        {}, "low-kahan", "LowPrecisionAdamW", "samestep", {"exp_avg": BF16, "exp_avg_sq": BF16, "compensation": BF16},
    ),
}  # fmt: skip


@pytest.mark.parametrize("engine", [*ENGINES, "zero2, offloaded", "zero3, offloaded"])
def test_p23_the_optimizer_is_the_one_asked_for(ranks, engine):
    """P23: An 8-bit optimizer was replaced by a 32-bit one; DeepSpeed likes to take its own where it offloads."""
    name, _, offloaded = engine.partition(", ")
    for case, (settings, regime, kind, package, states) in OPTIMIZERS.items():
        if offloaded and regime != "mixed":
            continue  # refused
        recipe = toy_recipe(name, regime, **settings)
        recipe["engine"] |= {"offload": "cpu"} if offloaded else {}
        for found in ranks.run(size_of(name), toy_steps, recipe=recipe, factor=1.0, steps=1):
            assert (found["optimizer"], found["from"]) == (kind, package), case
            assert found["states"] == states, case


HEAD, LENGTH = 64, 4096
LONG: dict[str, Any] = {
    "dtype": BF16,
    "hidden_size": HEAD,
    "head_dim": HEAD,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": LENGTH,
}


def look(model: nn.Module, inner: nn.Module) -> dict[str, Any]:
    """Two forward passes over one long row, in training and in evaluation: digests of the logits, dtypes of the
    buffers, and the cosines of all positions as the rotary embedding gives them to the layers."""
    found: dict[str, Any] = {"logits": [], "buffers": set()}
    rotary = inner.get_submodule("model.rotary_emb")

    def keep(module: nn.Module, _inputs: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        found["cos"] = output[0][0].float()
        found["buffers"] |= {buffer.dtype for buffer in module.buffers()}

    hook = rotary.register_forward_hook(keep)
    ids = torch.randint(0, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(8))
    for training in (True, False):
        model.train(training)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
        assert logits.dtype == BF16
        found["logits"].append(digest_of(logits))
    hook.remove()
    return found


def look_at_engine(recipe: dict[str, Any]) -> dict[str, Any]:
    """A job: `look` at the model of a recipe in its engine."""
    checked, here = Recipe.model_validate(recipe), world.start(timeout_seconds=60)
    model = loading.load_model(checked, here)
    engine = build.build(checked, model, build.resolve_plan(checked, model), here)
    try:
        return look(engine.model, engine.module)
    finally:
        engine.close()


def look_at_plain(folder: str) -> dict[str, Any]:
    """A job: the same by transformers alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=BF16)
    return look(model, model)


@pytest.fixture(scope="module")
def long_rows(ranks, model_folder) -> Callable[[str], list[dict[str, Any]]]:
    """What every rank of an engine, or `plain` transformers, sees of rows of 4096 tokens; once per engine."""

    @cache
    def seen(engine: str) -> list[dict[str, Any]]:
        folder = model_folder(**LONG)
        if engine == "plain":
            return ranks.run(1, look_at_plain, folder=folder)
        return ranks.run(size_of(engine), look_at_engine, recipe=make_recipe(engine, folder))

    return seen


def cosines(frequencies: torch.Tensor, positions: int) -> torch.Tensor:
    """cos of position times frequency, both halves of the head alike; fp64 [positions, HEAD]."""
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies.double()
    return angles.cos().repeat(1, 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_p24_buffers_are_the_same_in_training_and_evaluation(long_rows, engine):
    """P24: A cast before the evaluation took the fp32 buffers along, and the logits were others."""
    for found in long_rows(engine):
        assert found["buffers"] == {FP32}
        training, evaluation = found["logits"]
        assert training == evaluation


@pytest.mark.parametrize("engine", ENGINES)
def test_p25_rotary_frequencies_are_not_rounded(long_rows, engine):
    """P25: Frequencies that an engine casts to bf16 put cosines off by 0.86 within 2048 positions."""
    exact = 10000.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
    cast = cosines(exact.float().bfloat16(), 2048) - cosines(exact, 2048)
    assert cast.abs().max() == pytest.approx(0.86, abs=0.02)
    for found in long_rows(engine):
        # The layers get cosines in bf16, which are right to half of its spacing below 1.
        assert (found["cos"][:2048] - cosines(exact, 2048)).abs().max() < 2**-9 + 1e-3


@pytest.mark.parametrize("engine", ENGINES)
def test_p104_long_rows_give_the_logits_of_plain_transformers(long_rows, engine):
    """P104: With ZeRO-3 and bf16 the loss was too high, the more the longer the rows were."""
    (plain,) = long_rows("plain")
    for found in long_rows(engine):
        assert found["logits"] == plain["logits"]


@pytest.mark.parametrize("load_dtype", ["stored", "bfloat16", "float32"])
@pytest.mark.parametrize("engine", ["single", "fsdp", "zero3"])
def test_p103_constants_of_the_constructor_are_exact(ranks, model_folder, engine, load_dtype):
    """P103: Inside a context of bf16 a constructor's arange(4096) is rounded to eight bits. GPT-J makes a table of
    sines and cosines there, in the default dtype."""
    sizes = {"max_position_embeddings": 4096, "n_embd": 32, "n_layer": 1, "n_head": 1, "rotary_dim": 32}
    folder = model_folder(dtype=BF16, model_type="gptj", tie_word_embeddings=False, **sizes)
    angles = torch.arange(4096, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(0, 32, 2).double() / 32)
    right = torch.cat([angles.sin(), angles.cos()], dim=1)
    recipe = make_recipe(engine, folder, model__load_dtype=load_dtype)
    for found in ranks.run(size_of(engine), buffers, recipe=recipe):
        (table,) = (buffer for name, buffer in found.items() if name.endswith("embed_positions"))
        assert table.dtype == FP32
        # Angles of up to 4096 in fp32 are right to 2**-13.
        assert (table - right).abs().max() < 2**-11


@pytest.mark.parametrize("engine", ["fsdp", "zero2", "fsdp, offloaded", "zero2, offloaded", "zero3, offloaded"])
def test_p27_accumulation_in_fp32_and_bf16_differ_by_rounding(run, ranks, model_folder, engine):
    """P27: Gradients accumulated in fp32 on the offload path were others, and training slower. Four micro-batches."""
    folder, (name, _, offloaded) = model_folder(dtype=BF16), engine.partition(", ")
    changes: dict[str, Any] = {"train__accumulation": 4, "train__micro_batch": 1, "steps": 1} | FINE
    expected = reference_run(ranks, make_recipe("single", folder, **changes), EXAMPLES)
    offload: dict[str, Any] = {"engine__offload": "cpu"} if offloaded else {}
    wide = run(make_recipe(name, folder, **changes, **offload), EXAMPLES)
    assert wide.steps[0].grad_norm == expected[0][1]
    low = run(make_recipe("single", folder, regime="low", **changes), EXAMPLES)
    assert low.steps[0].grad_norm != expected[0][1]
    assert low.steps[0].grad_norm == pytest.approx(expected[0][1], rel=2**-8)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("engine", ENGINES)
def test_p45_decay_is_the_recipes_and_decoupled(ranks, engine, name):
    """P45: "Adam" meant AdamW, and what no recipe said was 0 or 0.01. Without a gradient, decay takes lr * decay of the
    weight; an Adam that adds it to the gradient takes lr."""
    for decay, weight in (({"weight_decay": 0.1}, (1 - 1e-2 * 0.1) ** 10), ({}, 1.0)):
        recipe = toy_recipe(engine, "mixed", name=name, lr=1e-2, **decay)
        for found in ranks.run(size_of(engine), toy_steps, recipe=recipe, factor=0.0, steps=10):
            assert found["weights"] == [pytest.approx(weight, rel=1e-6 if decay else 0)]


SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 136, "num_hidden_layers": 2}
CONFIG = (
    "{model_type: llama, "
    + ", ".join(f"{name}: {size}" for name, size in SIZES.items())
    + ", num_attention_heads: 4, num_key_value_heads: 2, tie_word_embeddings: false}"
)
TABLES = 2 * 512 * 64
MLPS = 2 * 3 * 64 * 136
ATTENTION = 2 * (2 * 64 * 64 + 2 * 32 * 64)
NORMS = 5 * 64
BUCKET = "engine.bucket_elements=2000"


def test_p113_frozen_weights_have_no_gradient_buffers(ranks):
    """P113: With most weights frozen, offloading them took more memory, for gradients that nobody needs. Bytes of live
    tensors after a backward pass by hand: 16 for every trained weight, 2 for every frozen one."""
    freeze = "model.freeze=[model.embed_tokens.*, lm_head.*, '*.mlp.*', '*.k_proj.*', '*.v_proj.*', '*.o_proj.*']"
    trained, frozen = 2 * 64 * 64 + NORMS, TABLES + MLPS + ATTENTION - 2 * 64 * 64
    assert frozen > 0.9 * (trained + frozen)
    cases: dict[tuple[str, tuple[str, ...]], float] = {
        ("ddp", ()): 16 * trained + 2 * frozen,
        ("fsdp", ()): (16 * trained + 2 * frozen) / 2,
        ("fsdp", ("engine.offload=cpu",)): (16 * trained + 2 * frozen) / 2,
        # ZeRO holds a bf16 copy of the weights beside fp32 masters, gradients and moments.
        ("zero2", (BUCKET,)): 2 * trained + 16 * trained / 2 + 2 * frozen,
        ("zero3", (BUCKET, "engine.persistent_elements=1")): (18 * trained + 2 * frozen) / 2 + 4 * 2000,
    }  # fmt: skip
    listed = [(engine, "mixed", CONFIG, (*settings, freeze)) for engine, settings in cases]
    for of_rank in ranks.run(2, live_bytes, cases=listed):
        for case, found, right in zip(cases, of_rank, cases.values(), strict=True):
            assert found["after_backward"] == pytest.approx(right, rel=0.1), case


def largest_buffer(engine: str, settings: tuple[str, ...]) -> int:
    """A job: bytes of the largest tensor that is summed over ranks in the first step of a run."""
    here = world.start(timeout_seconds=60)
    recipe = recipe_for(engine, "mixed", here.size, config=CONFIG, settings=settings)
    model = models.load_model(recipe.model, seed=0)
    live = build.build(recipe, model, build.resolve_plan(recipe, model), here)
    ids = torch.arange(16)[None]
    inputs = models.Inputs(input_ids=ids, labels=ids, position_ids=None, document_ids=None)
    try:
        with Collectives() as collectives:
            for turn in live.turns(1):
                live.backward(models.loss_sum(live.model, inputs, attention="sdpa")[0], turn, 1)
            live.apply(1e-3)
        return max(size for name, _, size in collectives.seen if "reduce" in name)
    finally:
        live.close()


ROOT, BLOCK = TABLES + 64, (MLPS + ATTENTION) // 2 + 2 * 64


@pytest.mark.parametrize(
    ("engine", "settings", "right"),
    [
        ("fsdp", (), 4 * max(ROOT, BLOCK)),
        ("zero2", ("engine.bucket_elements=1000000",), 4 * (TABLES + MLPS + ATTENTION + NORMS)),
        ("zero3", (BUCKET, "engine.persistent_elements=1"), 4 * TABLES // 2),
        ("zero2", (BUCKET,), 4 * TABLES // 2),
    ],
)
def test_p115_the_largest_buffer_of_a_reduction_is_the_planned_one(ranks, engine, settings, right):
    """P115: Two vocabulary tables in one reduction took 9 GiB at once, and no estimate had said so. Bytes by hand."""
    assert ranks.run(2, largest_buffer, engine=engine, settings=settings) == [right] * 2
    recipe = recipe_for(engine, "mixed", 2, config=CONFIG, settings=settings)
    assert planned(recipe).largest_buffer_bytes == right
