"""P100, P102, P105: one rank loads, the others get their part; buffers and ties come along.

That training is equal bit for bit from such a start, tied and untied, is in tests/equivalence: every run there on fsdp
and hsdp begins with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from samestep.recipe import Recipe
from tests.distributed import loading_jobs
from tests.small_runs import make_model, make_tokenizer, write_rows

if TYPE_CHECKING:
    from tests.distributed.ranks import RankPools


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    make_model().save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    write_rows(folder, 11)
    return folder


def recipe(source: Path, engine: str, ranks: int, regime: str = "mixed", **model: Any) -> dict[str, Any]:
    content = {
        "precision": {"regime": regime},
        "model": {"path": str(source / "model"), **model},
        "data": {"path": str(source / "rows.jsonl"), "format": "text"},
        "engine": {"name": engine, "ranks": ranks},
        "train": {"steps": 1},
    }
    return Recipe.model_validate(content).model_dump(mode="json")


@pytest.mark.parametrize("load_dtype", ["stored", "bfloat16"])
def test_p100_only_the_main_rank_ever_holds_the_whole_model(ranks: RankPools, source: Path, load_dtype: str) -> None:
    """P100: The others hold their shards and one unit, in the dtype of the masters."""
    main, other = ranks.run(2, loading_jobs.held_while_loading, recipe=recipe(source, "fsdp", 2, load_dtype=load_dtype))
    model = make_model()
    units = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    total = sum(p.numel() for p in model.parameters())
    root = total - sum(units)
    assert main["most"] >= main["whole"] == other["whole"]
    # fp32 shards, padded to equal chunks, of what came before, and the largest unit whole.
    assert other["most"] <= 4 * (0.55 * sum(units) + max(*units, root))
    assert other["most"] < 4 * total
    assert other["end"] <= 0.55 * 4 * total


@pytest.mark.parametrize("engine", ["ddp", "zero1", "zero3"])
def test_engines_that_hold_all_weights_load_them_themselves(ranks: RankPools, source: Path, engine: str) -> None:
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed")
    for held in ranks.run(2, loading_jobs.held_while_loading, recipe=recipe(source, engine, 2)):
        assert held["most"] >= held["whole"]


@pytest.mark.parametrize(("engine", "size"), [("fsdp", 2), ("hsdp", 4)])
@pytest.mark.parametrize("load_dtype", ["stored", "bfloat16"])
def test_p102_buffers_are_exact_on_every_rank(
    ranks: RankPools, source: Path, engine: str, size: int, load_dtype: str
) -> None:
    """P102: Rotary frequencies are in no file: what `to_empty` leaves there is garbage. Expected from their formula."""
    config: Any = make_model().config
    head = config.head_dim
    theta = config.rope_parameters["rope_theta"]
    expected = 1.0 / theta ** (torch.arange(0, head, 2, dtype=torch.float32) / head)
    for found in ranks.run(size, loading_jobs.buffers, recipe=recipe(source, engine, size, load_dtype=load_dtype)):
        rotary = [buffer for name, buffer in found.items() if name.endswith("inv_freq")]
        assert rotary
        for buffer in rotary:
            assert buffer.dtype == torch.float32
            torch.testing.assert_close(buffer, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("engine", ["fsdp", "hsdp"])
def test_p105_a_tied_weight_gets_the_gradient_of_both_its_uses(ranks: RankPools, source: Path, engine: str) -> None:
    """P105: What is made real from the meta device is not tied any more, and the embedding gets half its gradient."""
    rows = [[3, 5, 7, 11, 13], [4, 4, 16, 2, 9, 1]]
    plain = make_model()
    for row in rows:
        ids = torch.tensor([row])
        torch.nn.functional.cross_entropy(plain(input_ids=ids).logits[0], ids[0], reduction="sum").backward()
    right = plain.model.embed_tokens.weight.grad
    assert right is not None and plain.lm_head.weight is plain.model.embed_tokens.weight
    found = torch.full((right.numel(),), float("nan"))
    made = ranks.run(2, loading_jobs.tied_gradient, recipe=recipe(source, engine, 2, "full"), rows=rows)
    for is_tied, pieces in made:
        assert is_tied
        for start, values in pieces:
            found[start : start + values.numel()] = values
    torch.testing.assert_close(found.view_as(right), right, rtol=1e-5, atol=1e-6)
