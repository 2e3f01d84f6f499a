"""Runs that have ended and logs of other tools, side by side; every faulty input is one short message."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from samestep import cli
from samestep.compare.finished import compare_finished
from samestep.compare.logs import read_log
from samestep.errors import SamestepError
from tests.unit.compare.made_runs import csv_log, falling, made_run


def test_two_runs_that_are_equal(tmp_path: Path) -> None:
    """P131, P133: two engines under one regime, from what they left."""
    a, b = made_run(tmp_path / "a", "engine.name=ddp"), made_run(tmp_path / "b", "engine.name=fsdp")
    report, _ = compare_finished([a, b])
    pair = report["pairs"][0]
    assert (pair["must_agree"], pair["bit_equal"], pair["relation"], report["ok"]) == (True, True, "bit-equal", True)
    assert [(d["field"], d["kind"]) for d in pair["differences"]] == [("engine.name", "tested")]


def test_equal_steps_and_other_weights(tmp_path: Path) -> None:
    a, b = made_run(tmp_path / "a"), made_run(tmp_path / "b", "engine.name=zero3", digest="1")
    report, _ = compare_finished([a, b])
    assert report["pairs"][0]["first_difference"] == {"step": 40, "quantity": "weights"}
    assert report["ok"] is False


def test_unequal_work_is_refused_with_every_field(tmp_path: Path) -> None:
    """P122, P123: engines under unlike settings are not compared unasked."""
    a = made_run(tmp_path / "a")
    b = made_run(tmp_path / "b", "engine.name=zero3", "precision.regime=low", "train.max_grad_norm=1.0")
    with pytest.raises(SamestepError) as caught:
        compare_finished([a, b])
    message = str(caught.value)
    assert "precision.regime is mixed in one and low in the other" in message
    assert "train.max_grad_norm is null in one and 1.0 in the other" in message
    assert "engine.name" not in message
    assert caught.value.exit_code == 2
    with pytest.raises(SamestepError, match="max_grad_norm"):
        compare_finished([a, b], tested=["precision"])
    assert compare_finished([a, b], tested=["precision", "train.max_grad_norm"])[0]["pairs"][0]["must_agree"] is False


def test_other_tokens_are_other_work(tmp_path: Path) -> None:
    a, b = made_run(tmp_path / "a"), made_run(tmp_path / "b", label_tokens=99, loss=lambda u: falling(u) + 0.1)
    with pytest.raises(SamestepError, match="label_tokens of step 1 is 100 in one and 99 in the other"):
        compare_finished([a, b])
    report, _ = compare_finished([a, b], allow_unequal=True)
    assert "did not do the same work" in report["pairs"][0]["cause"]


def test_the_trap_of_the_larger_learning_rate(tmp_path: Path) -> None:
    """P07: curves that part between engines; the report names the optimizer's dtype, not the learning rate."""
    a = made_run(tmp_path / "mixed")
    b = made_run(
        tmp_path / "low", "precision.regime=low", loss=lambda u: falling(0.1 * u), master="bfloat16", lost=0.98
    )
    pair = compare_finished([a, b], tested=["precision"])[0]["pairs"][0]
    assert pair["relation"] == "diverging"
    assert pair["stretch"]["matches"]
    assert pair["stretch"]["speed"] == pytest.approx(0.1, rel=0.1)
    assert pair["cause"].startswith("low's optimizer works in bfloat16: forecast 98% of updates lost")


def test_a_run_that_has_not_ended_is_compared_as_far_as_it_came(tmp_path: Path) -> None:
    a, b = made_run(tmp_path / "a"), made_run(tmp_path / "b", steps=10, done=False)
    report, _ = compare_finished([a, b])
    assert report["variants"][1]["notes"] == ["the run has not ended: 10 of 40 steps are there"]
    assert report["pairs"][0]["steps_compared"] == 10
    assert report["pairs"][0]["ends_early"]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("recipe.yaml", lambda text: "{{{", "is no recipe that can be read"),
        ("steps.jsonl", lambda text: re.sub('{"step": [678],.*\n', "", text), "step 9 follows step 5"),
        ("steps.jsonl", lambda text: text.splitlines(True)[0] + text, "step 1 follows step 1"),
        ("steps.jsonl", lambda text: text.replace('"loss": 4.0', '"loss": "4"'), "line 1 is no step of samestep"),
        ("steps.jsonl", lambda text: text.replace('"step": 1,', '"step": "1",'), "line 1 is no step of samestep"),
        ("summary.json", lambda text: text[:5], "cannot be read"),
    ],
)
def test_a_damaged_run_is_refused(tmp_path: Path, file: str, change: Callable[[str], str], message: str) -> None:
    a, b = made_run(tmp_path / "a"), made_run(tmp_path / "b")
    (b / file).write_text(change((b / file).read_text()))
    with pytest.raises(SamestepError, match=message):
        compare_finished([a, b])


def test_a_run_without_its_recipe_says_so(tmp_path: Path) -> None:
    a, b = made_run(tmp_path / "a"), made_run(tmp_path / "b")
    (b / "recipe.yaml").unlink()
    report, _ = compare_finished([a, b])
    assert report["variants"][1]["notes"] == ["its recipe is not there: what was run is not known"]


LOSSES = [4.0, 3.5, 3.25]


def test_logs_of_every_kind_say_the_same(tmp_path: Path) -> None:
    csv_log(tmp_path / "a.csv", LOSSES)
    lines = [{"global_step": n, "train_loss": loss} for n, loss in enumerate(LOSSES, start=1)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"eval_loss": 3.0}]))
    history = [{"step": n, "loss": loss, "learning_rate": 0.1} for n, loss in enumerate(LOSSES, start=1)]
    state = {"log_history": [*history, {"step": 3, "eval_loss": 3.0}, {"step": 3, "train_loss": 3.6}]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    for name in ("a.csv", "b.jsonl", "trainer_state.json"):
        assert [(s["step"], s["loss"]) for s in read_log(tmp_path / name)] == list(enumerate(LOSSES, start=1))
    report, _ = compare_finished([tmp_path / "a.csv", tmp_path / "trainer_state.json"])
    assert report["pairs"][0]["relation"] == "equal where recorded"
    assert "is not known" in report["verdict"]


def test_a_byte_order_mark_is_no_fault_and_a_pipe_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\ufeff{"step": 1, "loss": 4}\n')
    (tmp_path / "b.json").write_text('\ufeff{"log_history": [{"step": 1, "loss": 4}]}')
    assert read_log(tmp_path / "a.jsonl") == read_log(tmp_path / "b.json") == [{"step": 1, "loss": 4.0}]
    os.mkfifo(tmp_path / "c.csv")
    with pytest.raises(SamestepError, match="is no file"):
        read_log(tmp_path / "c.csv")


def test_a_log_without_norms_is_compared_in_its_losses(tmp_path: Path) -> None:
    a, b = made_run(tmp_path / "a", steps=3), csv_log(tmp_path / "b.csv", [falling(0), falling(1), falling(2)])
    history = [{"step": n, "loss": falling(n - 1), "grad_norm": 1.0} for n in (1, 2, 3)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    for other in (a, tmp_path / "trainer_state.json"):
        pair = compare_finished([other, b])[0]["pairs"][0]
        assert (pair["relation"], pair["max_abs_loss_gap"]) == ("equal where recorded", 0.0)
        assert pair["max_abs_grad_norm_gap"] is None
    assert cli.main(["compare", str(a), str(b), "--out", str(tmp_path / "c")]) == 0
    assert (tmp_path / "c" / "compare.png").exists()


def test_a_tensorboard_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "tb"))
    for n, loss in enumerate(LOSSES, start=1):
        writer.add_scalar("train/loss", loss, n)
    writer.close()
    assert [(s["step"], s["loss"]) for s in read_log(tmp_path / "tb")] == list(enumerate(LOSSES, start=1))


def test_tensorboard_files_that_cannot_be_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for content in (b"", b"no events"):
        (tmp_path / "events.out.tfevents.1").write_bytes(content)
        with pytest.raises(SamestepError, match="holds no scalar"):
            read_log(tmp_path)


def test_a_tensorboard_file_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorboard.backend.event_processing.event_accumulator", None)
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    with pytest.raises(SamestepError, match=r"samestep\[trackers\]"):
        read_log(tmp_path / "events.out.tfevents.1")


def test_losses_that_are_not_finite_are_shown_as_such(tmp_path: Path) -> None:
    a, b = csv_log(tmp_path / "a.csv", LOSSES), csv_log(tmp_path / "b.csv", [4.0, math.nan, 3.25])
    report, _ = compare_finished([a, b])
    assert report["variants"][1]["notes"][-1] == "1 of 3 losses are not finite"
    assert report["pairs"][0]["first_difference"] == {"step": 2, "quantity": "loss"}
    json.dumps(report, allow_nan=False)


def test_logs_with_other_intervals_are_compared_where_both_have_a_step(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,loss\n10,4\n20,3\n30,2\n")
    (tmp_path / "b.csv").write_text("step,loss\n5,9\n10,4\n15,9\n20,3.5\n")
    pair = compare_finished([tmp_path / "a.csv", tmp_path / "b.csv"])[0]["pairs"][0]
    assert (pair["steps_compared"], pair["first_difference"]) == (2, {"step": 20, "quantity": "loss"})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", "", "is empty"),
        ("x.csv", "step,loss\n", "has no step with a loss"),
        ("x.csv", "step,nll\n1,2\n", "has no column for the loss; it has step, nll"),
        ("x.csv", "step,loss\n1,two\n", "the loss 'two' is not a number"),
        ("x.csv", "step,loss\n1.5,2\n", "is not a whole number"),
        ("x.csv", "step,loss\n1,2\n1,3\n", "has step 1 twice"),
        ("x.jsonl", "", "is empty"),
        ("x.jsonl", '{"step": 1,\n', "is not JSON"),
        ("x.jsonl", "[1]\n", "is not a JSON object"),
        ("x.json", "{}", "has no log_history"),
        ("x.txt", "hello", "is no log of a known kind"),
    ],
)
def test_faulty_logs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    text: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    good = csv_log(tmp_path / "good.csv", LOSSES)
    assert cli.main(["compare", str(good), name, "--no-picture", "--out", "c"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "c" / "compare.json").exists()


def test_the_command_on_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = csv_log(tmp_path / "a.csv", LOSSES, "it,nll"), csv_log(tmp_path / "b.csv", LOSSES, "it,nll")
    line = ["compare", str(a), str(b), "--columns", "step=it,loss=nll", "--out", str(tmp_path / "c")]
    assert cli.main([*line, "--no-picture"]) == 0
    assert (tmp_path / "c" / "compare.html").exists()
    assert cli.main([*line, "--no-picture"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert cli.main(["compare", str(a), str(b), "--engines", "fsdp"]) == 2
