"""The work of a recipe against FLOPs that torch counts on a live model, and against closed forms."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from samestep import models
from samestep.planning.cluster.work import Work, work_of
from samestep.recipe import parse
from samestep.recipe.schema import Recipe

SIZES = (
    "model_type: llama, vocab_size: 96, hidden_size: 32, intermediate_size: 40, num_hidden_layers: 3, "
    "num_attention_heads: 4, num_key_value_heads: 2"
)


def recipe(engine: str = "name: fsdp", train: str = "", model: str = "", *, tied: bool = False) -> Recipe:
    return parse(
        f"{{model: {{config: {{{SIZES}, tie_word_embeddings: {str(tied).lower()}}}, tokenizer: none, attention: eager"
        f"{model}}}, data: {{path: none, max_tokens: 16}}, engine: {{{engine}, ranks: 8}}, "
        f"train: {{steps: 1, micro_batch: 2{train}}}}}"
    )


def work(*arguments: str, tied: bool = False) -> Work:
    made = recipe(*arguments, tied=tied)
    return work_of(made, models.load_meta_model(made.model))


def counted(made: Recipe) -> tuple[int, int]:
    """FLOPs of the forward and of the backward pass of a live model, as torch counts them."""
    model = models.load_model(made.model, seed=0)
    tokens = torch.zeros(made.train.micro_batch, made.data.max_tokens, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=tokens, use_cache=False).logits.float().sum()
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("tied", [False, True])
def test_flops_are_those_that_torch_counts(tied: bool) -> None:
    made = recipe(tied=tied)
    found = work_of(made, models.load_meta_model(made.model))
    forward, backward = counted(made)
    assert sum(unit.forward for unit in found.units) == forward
    assert sum(unit.backward for unit in found.units) == backward


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    whole, frozen = work(), work("name: fsdp", "", ', freeze: ["*mlp*"]')
    mlp = 3 * 3 * 32 * 40
    assert whole.trainable - frozen.trainable == mlp
    assert sum(u.elements for u in whole.units) == sum(u.elements for u in frozen.units)
    assert sum(u.backward for u in whole.units) - sum(u.backward for u in frozen.units) == 2 * 32 * mlp


def test_recomputing_repeats_the_blocks_and_not_the_head() -> None:
    plain, again = work(), work("name: fsdp", ", activation_checkpointing: true")
    assert again.root == plain.root
    for before, after in zip(plain.blocks, again.blocks, strict=True):
        assert after.backward - before.backward == before.forward
        assert after.backward_moved - before.backward_moved == pytest.approx(before.forward_moved)


def test_a_causal_mask_leaves_half_of_the_scores_and_the_diagonal() -> None:
    made = recipe()
    model = models.load_meta_model(made.model)
    eager = work_of(made, model)
    sdpa = work_of(made.model_copy(update={"model": made.model.model_copy(update={"attention": "sdpa"})}), model)
    # Two products of 2 rows, 16 queries, 16 keys and 32 numbers in each of 3 layers.
    scores = 3 * 2 * 2 * 2 * 16 * 16 * 32
    assert sum(u.forward for u in eager.units) - sum(u.forward for u in sdpa.units) == scores * (1 - 17 / 32)


@pytest.mark.parametrize(
    ("engine", "shards"),
    [("ddp", 1), ("fsdp", 8), ("hsdp", 4), ("hsdp, shard_ranks: 2", 2), ("zero1", 8), ("zero2", 8), ("zero3", 8)],
)
def test_ranks_that_share_the_state(engine: str, shards: int) -> None:
    assert work(f"name: {engine}").shard_ranks == shards


def test_every_parameter_is_gathered_once() -> None:
    for tied in (False, True):
        made = recipe(tied=tied)
        model = models.load_meta_model(made.model)
        found = work_of(made, model)
        assert len(found.blocks) == 3
        assert sum(u.elements for u in found.units) == found.trainable == sum(p.numel() for p in model.parameters())
