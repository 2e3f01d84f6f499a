"""bench.json and its tables, from rounds made up here."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.bench.contenders import PEERS, Contender
from samestep.bench.order import Measured
from samestep.bench.report import Settings, make_report
from samestep.bench.run import _plan
from samestep.bench.table import markdown, rich_tables, tables
from tests.unit.bench.test_contenders import CONFIG, recipe

SETTINGS = Settings(rounds=2, warmup=1, steps=3, split=1)
PARTS: dict[str, float | None] = {
    "data": 0.1, "forward": 0.5, "backward": 1.0, "optimizer": 0.2, "communication": 0.4, "step": 2.0,
}  # fmt: skip


def measured(seconds: list[float], **changes: Any) -> Measured:
    content: dict[str, Any] = {
        "step_seconds": seconds,
        "losses": [3.0, 2.0, 1.0, 0.5, 0.25],
        "label_tokens": [30, 30, 30],
        "rows": [[8, 8], [8, 8], [8, 8]],
        "parts": PARTS,
        "peak_memory_bytes": [1000, 2000],
        "device": "cpu",
    }
    return Measured(**content | changes)


def made(rounds: dict[str, list[Measured]], **changes: Any) -> dict[str, Any]:
    found = [
        Contender(name=name, title=name, recipe=recipe(**changes), peer="fsdp2" if name == "fsdp2" else None)
        for name in rounds
    ]
    return make_report("toy", found, [PEERS["fabric"]], _plan(found[0]), SETTINGS, rounds)


def test_rates_are_of_tokens_per_second_and_device() -> None:
    found = made({"fsdp": [measured([1.0, 2.0, 4.0]), measured([2.0, 2.0, 2.0])], "fsdp2": [measured([4.0] * 3)] * 2})
    row = found["rows"][0]
    assert row["step_seconds"] == 2.0
    assert row["tokens_per_second_per_device"] == 16 / 2.0 / 2  # two devices
    assert row["label_tokens_per_second"] == 15.0
    assert (row["peak_memory_bytes"], row["peak_memory_bytes_by_rank"]) == (2000, [1000, 2000])
    assert found["ratios"] == {"fsdp/fsdp2": {"median": 0.5, "smallest": 0.5, "largest": 0.5}}
    assert found["not_installed"] == [
        {"engine": "fabric", "title": "Lightning Fabric, FSDP2", "status": "not installed"}
    ]


def test_mfu_is_null_on_an_unknown_device_and_has_its_conventions_on_a_known_one() -> None:
    unknown = made({"fsdp": [measured([1.0] * 3)] * 2})
    assert unknown["rows"][0]["mfu"] is None
    assert unknown["device"]["peak_flops"] is None
    assert any("null" in note for note in unknown["footnotes"])
    known = made({"fsdp": [measured([1.0] * 3, device="NVIDIA A100-SXM4-80GB")] * 2})
    row = known["rows"][0]
    head, blocks = 32 * 8, 2 * (8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 12)
    parameters = 2 * head + blocks + 5 * 8
    assert len(tables(known)[0][0]) == len(tables(unknown)[0][0]) + 3
    assert (row["mfu"], row["mfu_convention"]) == (pytest.approx(6 * parameters * 8 / 312e12), "6N")
    full = 6 * (blocks + head) + 12 * CONFIG["num_hidden_layers"] * 8 * 8
    causal = 6 * (blocks + head) + 12 * CONFIG["num_hidden_layers"] * 8 * 4.5
    assert row["mfu_with_attention"]["full"] == pytest.approx(full * 8 / 312e12)
    assert row["mfu_with_attention"]["causal"] == pytest.approx(causal * 8 / 312e12)


def test_mfu_with_causal_and_with_full_attention_stand_side_by_side() -> None:
    """P120: with full scores a reader saw an MFU of 1.21 (torchtitan#341); both are shown, each named."""
    found = made({"fsdp": [measured([1e-9] * 3, device="NVIDIA A100-SXM4-80GB")] * 2})
    causal, full = map(float, tables(found)[0][1][0][5:7])
    assert "| MFU 6N | MFU causal | MFU full |" in markdown(found, {})
    assert 0 < causal < full


def test_a_model_whose_flops_are_not_known_has_none() -> None:
    experts = dict(CONFIG, model_type="mixtral", num_local_experts=2, num_experts_per_tok=1)
    found = made({"fsdp": [measured([1.0] * 3)] * 2}, model={"config": experts})
    assert found["flops_per_token"] == {}
    assert any("mixture of experts" in note for note in found["footnotes"])


def test_engines_of_ours_with_other_losses_are_not_ok() -> None:
    other = measured([1.0] * 3, losses=[3.0, 2.0, 1.0, 0.5, 0.26])
    same = measured([1.0] * 3)
    assert made({"fsdp": [same, same], "zero3": [same, same]})["ok"]
    apart = made({"fsdp": [same, same], "zero3": [same, other]})
    assert not apart["ok"]
    assert apart["rows"][1]["losses"]["max_abs_gap"] == pytest.approx(0.01)
    # A loop of another tool is not ours to judge.
    assert made({"fsdp": [same, same], "fsdp2": [same, other]})["ok"]


def test_a_part_that_cannot_be_told_apart_is_a_dash_with_a_footnote() -> None:
    fused = {name: value for name, value in PARTS.items() if name != "optimizer"}
    same = measured([1.0] * 3)
    found = made({"fsdp": [same] * 2, "fsdp2": [measured([1.0] * 3, parts=fused)] * 2})
    assert found["rows"][1]["split_seconds"]["optimizer"] is None
    assert any("inside of backward" in note for note in found["footnotes"])
    _, rows = tables(found)[1]
    # data, forward, backward, optimizer, rest, whole step, communication
    assert rows[0][1:] == ["0.100", "0.500", "1.000", "0.200", "0.200", "2.000", "0.400"]
    assert rows[1][1:] == ["0.100", "0.500", "1.000", "-", "0.400", "2.000", "0.400"]


@pytest.mark.parametrize(
    ("other", "regime", "noted"),
    [("deepspeed", "mixed", True), ("deepspeed", "full", False), ("fsdp2", "mixed", False), ("zero3", "mixed", False)],
)
def test_masters_that_deepspeed_rounds_are_noted(other: str, regime: str, noted: bool) -> None:
    """Under mixed its loops lost the low bits of fp32 weights; from weights that bfloat16 holds their losses are equal
    to fp32's rounding, as under full."""
    rounds = {"fsdp": [measured([1.0] * 3)] * 2, other: [measured([1.0] * 3)] * 2}
    found = made(rounds, precision={"regime": regime})
    assert any("start from rounded ones" in note for note in found["footnotes"]) is noted


def test_the_page_has_a_row_for_everyone() -> None:
    found = made({"fsdp": [measured([1.0] * 3)] * 2, "fsdp2": [measured([4.0] * 3)] * 2})
    page = markdown(found, {"torch": "1.2.3"})
    assert "tokens/s/device | step (s) | quartiles | label tokens/s | peak GB/rank |" in page
    assert "| fsdp2 | 2.0 | 4.000 |" in page
    assert "| Lightning Fabric, FSDP2 | not installed | - |" in page
    assert "fsdp/fsdp2: 0.250 (0.250-0.250)" in page
    assert "regime mixed" in page
    assert "torch 1.2.3" in page
    assert len(rich_tables(found)) == 2
