"""What a benchmark refuses: unequal work, unequal plans, and loops that do not do the recipe's work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samestep.bench import contenders as module
from samestep.bench import run
from samestep.bench.contenders import PEERS, Contender, contenders, refuse_unequal_plans
from samestep.bench.report import Settings
from samestep.bench.run import _plan, prepare
from samestep.errors import EngineError, OutputError, SamestepError
from samestep.recipe import Recipe

CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def recipe(**sections: dict[str, Any]) -> Recipe:
    content: dict[str, Any] = {
        "model": {"config": CONFIG, "tokenizer": "none", "load_dtype": "float32"},
        "data": {"path": "none"},
        "engine": {"name": "fsdp", "ranks": 2},
        "train": {"steps": 2},
    }
    return Recipe.model_validate({**content, **{name: content.get(name, {}) | more for name, more in sections.items()}})


def test_everyone_gets_the_same_work_and_an_engine() -> None:
    found, missing = contenders(recipe(), [("fsdp", "mixed"), ("single", "mixed")], ["fsdp2"])
    assert [(each.name, each.recipe.engine.name, each.processes) for each in found] == [
        ("fsdp", "fsdp", 2),
        ("single", "single", 1),
        ("fsdp2", "fsdp", 2),
    ]
    assert all(each.recipe.data.drop_last for each in found)
    assert missing == []
    refuse_unequal_plans(found, [_plan(each) for each in found])


def test_unequal_regimes_are_refused() -> None:
    """P123: the speed-up of 2.9 of OpenTau#177 was 1.96 once the optimizers worked in one dtype."""
    with pytest.raises(SamestepError, match=r"precision.regime is mixed in one and low in the other") as caught:
        contenders(recipe(), [("zero3", "mixed"), ("ddp", "low")])
    assert caught.value.exit_code == 2


def test_one_engine_twice_is_refused() -> None:
    with pytest.raises(SamestepError, match="fsdp is given twice"):
        contenders(recipe(), [("fsdp", "mixed"), ("fsdp", "mixed")])


def test_one_can_be_timed_alone() -> None:
    found, missing = contenders(recipe(), [("fsdp", "mixed")])
    assert [each.name for each in found] == ["fsdp"]
    assert missing == []


def test_a_peer_that_is_not_installed_is_named_and_nothing_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[[str], Any] = module.find_spec
    monkeypatch.setattr(module, "find_spec", lambda name: None if "lightning" in name else real(name))
    found, missing = contenders(recipe(), [("fsdp", "mixed"), ("ddp", "mixed")], ["fabric"])
    assert [each.name for each in found] == ["fsdp", "ddp"]
    assert missing == [PEERS["fabric"]]


def test_unequal_plans_are_refused() -> None:
    """P122: frozen weights stay in fp32 on fsdp, and DeepSpeed casts them: other memory, other speed."""
    partly = recipe(model={"freeze": ["*embed_tokens*"]})
    found, _ = contenders(partly, [("fsdp", "mixed"), ("zero3", "mixed")])
    with pytest.raises(
        EngineError, match=r"of equal plans, and the role frozen is .*float32.* for fsdp but .*bfloat16"
    ):
        refuse_unequal_plans(found, [_plan(each) for each in found])


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"precision": {"regime": "low"}}, "the regime low"),
        ({"precision": {"low_dtype": "float16"}}, "low_dtype float16"),
        ({"engine": {"offload": "cpu"}}, "offload"),
        ({"train": {"accumulation": 2}}, "accumulation"),
        (
            {"model": {"freeze": ["*embed_tokens*"]}, "precision": {"overrides": {"frozen": "bfloat16"}}},
            "frozen weights in another dtype",
        ),
        (
            {"model": {"freeze": ["*embed_tokens*"], "load_dtype": "bfloat16"}, "precision": {"regime": "full"}},
            "frozen weights in low precision",
        ),
    ],
)
def test_loops_that_do_not_do_the_work_are_refused(sections: dict[str, Any], named: str) -> None:
    wanted = recipe(**sections)
    found, _ = contenders(wanted, [("fsdp", wanted.precision.regime)], ["fsdp2"])
    with pytest.raises(EngineError, match=f"hand-written loops do not do {named}"):
        refuse_unequal_plans(found, [_plan(each) for each in found])


def test_results_are_not_lost(tmp_path: Path) -> None:
    found = [Contender(name="fsdp", title="samestep fsdp", recipe=recipe())]
    (tmp_path / "bench.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"holds bench\.json"):
        prepare(tmp_path, found, overwrite=False)
    assert (tmp_path / "bench.json").read_text() == "{}"
    prepare(tmp_path, found, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_what_failed_before_its_first_result_can_be_tried_again(tmp_path: Path) -> None:
    found = [Contender(name="fsdp", title="samestep fsdp", recipe=recipe())]
    (tmp_path / "rounds.jsonl").write_text("")
    (tmp_path / "fsdp.log").write_text("no such file")
    prepare(tmp_path, found, overwrite=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "rounds.jsonl").write_text("{}\n")
    with pytest.raises(OutputError, match=r"holds rounds\.jsonl"):
        prepare(tmp_path, found, overwrite=False)


def test_a_log_is_named_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def died(*_: Any, **__: Any) -> None:
        raise EngineError("rank 1 died", where="", remedy="")

    monkeypatch.setattr(run, "launch_ranks", died)
    each = Contender(name="fsdp", title="samestep fsdp", recipe=recipe())
    settings = Settings(rounds=1, warmup=1, steps=1, split=0)
    for named in (False, True):
        with pytest.raises(SamestepError) as caught:
            run._round(each, settings, tmp_path)
        assert ("fsdp.log" in str(caught.value)) is named
        (tmp_path / "fsdp.log").touch()
