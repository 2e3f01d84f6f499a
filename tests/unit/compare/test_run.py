"""The comparison around its runs, with stand-ins for the processes of the variants."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from samestep import cli
from samestep.compare import picture, run, schedule
from samestep.compare.sets import expand
from samestep.compare.table import share, table
from samestep.errors import EngineError, OutputError, PrecisionError, RunError, SamestepError
from samestep.recipe import Recipe, parse, resolved_text
from samestep.training import guard

GOOD = "name: story\nmodel: {path: ./m}\ndata: {path: d.jsonl}\nengine: {ranks: 2}\ntrain: {steps: 2}\n"
# Loss, gradient norm and share of lost updates of every step, by regime.
CURVES = {
    "mixed": [(4.0, 2.0, 0.0), (3.0, 1.5, None)],
    "low": [(4.0, 2.0, 0.75), (3.5, 1.75, 0.25)],
    "full": [(4.0, 2.0, 0.0), (2.5, 1.25, None)],
}

PRECISION = {"plan": {"roles": {"master": {"dtype": ["float32"], "reason": ""}}}, "facts": None, "forecast": None}


class FakeChild:
    """Leaves what a run leaves, at once. `faults` holds what goes wrong, by engine."""

    faults: ClassVar[dict[str, Any]] = {}
    started: ClassVar[list[str]] = []
    resumed: ClassVar[list[str]] = []
    devices: ClassVar[dict[str, str | None]] = {}
    open: ClassVar[list[str]] = []
    most_open: ClassVar[int] = 0

    def __init__(
        self, recipe: Recipe, out: Path, log: Path, *, resume: bool = False, devices: str | None = None
    ) -> None:
        FakeChild.devices[out.name] = devices
        self.engine, self.name = recipe.engine.name, out.name
        FakeChild.started.append(out.name)
        FakeChild.resumed += [out.name] if resume else []
        log.write_text("what the run printed\n")
        (out / "recipe.yaml").write_text(resolved_text(recipe))
        (out / "precision.json").write_text(json.dumps(PRECISION))
        fault = self.faults.get(self.engine)
        shift = fault if isinstance(fault, float) else 0.0
        lines = [
            {"step": n, "loss": loss + shift, "grad_norm": norm, "lost_update_share": lost}
            for n, (loss, norm, lost) in enumerate(CURVES[recipe.precision.regime], start=1)
        ]
        (out / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        save_file({"w": torch.tensor([1.0, 2.0]) + shift}, out / "masters.safetensors")
        summary = {
            "status": "interrupted" if fault == "interrupted" else "completed",
            "first_loss": lines[0]["loss"],
            "last_loss": lines[-1]["loss"],
            "evaluations": [{"step": 0, "loss": 5.0}, {"step": 2, "loss": 4.5}],
            "weights_sha256": "0",
            "seconds": 1.0,
            "machine": {"device": "cpu"},
        }
        (out / "summary.json").write_text(json.dumps(summary))

    def __enter__(self) -> FakeChild:
        FakeChild.open.append(self.name)
        FakeChild.most_open = max(FakeChild.most_open, len(FakeChild.open))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        FakeChild.open.remove(self.name)

    def ended(self, seconds: float) -> bool:
        return True

    def failure(self) -> SamestepError | None:
        fault = self.faults.get(self.engine)
        return fault if isinstance(fault, SamestepError) else None


@pytest.fixture(autouse=True)
def fake_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeChild, "faults", {})
    monkeypatch.setattr(FakeChild, "started", [])
    monkeypatch.setattr(FakeChild, "resumed", [])
    monkeypatch.setattr(FakeChild, "devices", {})
    monkeypatch.setattr(FakeChild, "open", [])
    monkeypatch.setattr(FakeChild, "most_open", 0)
    monkeypatch.setattr(schedule, "Child", FakeChild)
    # These recipes' models do not exist.
    monkeypatch.setattr(guard, "refuse_recipe", lambda recipe: None)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def recipe() -> Recipe:
    return parse(GOOD)


def compared(recipe: Recipe, out: Path, **options: Any) -> dict[str, Any]:
    options = {"json_output": True, "picture": False, **options}
    return run.compare(recipe, ["fsdp", "zero3"], ["mixed", "low"], out, **options)


def test_compare_json(recipe: Recipe, tmp_path: Path) -> None:
    report = compared(recipe, tmp_path / "c")
    assert json.loads((tmp_path / "c" / "compare.json").read_text()) == report
    assert [v["name"] for v in report["variants"]] == ["fsdp+mixed", "zero3+mixed", "fsdp+low", "zero3+low"]
    third = report["variants"][2]
    assert {key: third[key] for key in ("engine", "precision", "overrides", "run")} == {
        "engine": "fsdp",
        "precision": "low",
        "overrides": [],
        "run": str(tmp_path / "c" / "fsdp+low"),
    }
    assert (third["first_loss"], third["last_loss"], third["lost_update_share"]) == (4.0, 3.5, 0.5)
    assert third["held_out"] == {"before": 5.0, "after": 4.5}
    pairs = {(p["a"], p["b"]): p for p in report["pairs"]}
    assert len(pairs) == 6
    assert pairs["fsdp+mixed", "zero3+mixed"]["bit_equal"]
    other = pairs["fsdp+mixed", "fsdp+low"]
    assert other["first_difference"] == {"step": 2, "quantity": "loss"}
    assert (other["max_abs_loss_gap"], other["max_abs_grad_norm_gap"], other["max_abs_weight_gap"]) == (0.5, 0.25, 0.0)
    assert report["ok"] is True
    assert report["bound"]["max_relative_loss_gap"] == 0


def test_an_engine_that_differs_is_not_ok(recipe: Recipe, tmp_path: Path) -> None:
    FakeChild.faults = {"zero3": 2.0**-30}
    report = compared(recipe, tmp_path / "c")
    assert report["ok"] is False
    pair = report["pairs"][0]
    assert (pair["must_agree"], pair["within_bound"]) == (True, False)
    assert pair["first_difference"] == {"step": 1, "quantity": "loss"}


def test_masters_go_once_they_are_compared(recipe: Recipe, tmp_path: Path) -> None:
    compared(recipe, tmp_path / "c")
    assert list(tmp_path.rglob("masters.safetensors")) == []
    compared(recipe, tmp_path / "c", overwrite=True, keep_masters=True)
    assert len(list(tmp_path.rglob("masters.safetensors"))) == 4


def test_a_failing_variant_ends_the_comparison(recipe: Recipe, tmp_path: Path) -> None:
    FakeChild.faults = {"zero3": RunError("the loss of step 2 is not finite.", remedy="Lower the learning rate.")}
    with pytest.raises(SamestepError) as caught:
        compared(recipe, tmp_path / "c")
    assert str(caught.value) == "variant zero3+mixed: the loss of step 2 is not finite. Lower the learning rate."
    assert caught.value.exit_code == 1
    assert FakeChild.started == ["fsdp+mixed", "zero3+mixed"]
    assert not (tmp_path / "c" / "compare.json").exists()
    assert (tmp_path / "c" / "fsdp+mixed" / "summary.json").exists()


def test_side_by_side_on_sets_of_devices(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    report = compared(recipe, tmp_path / "out", device_sets=["0,1", "3,2"])
    # In the order of the variants, however they ended.
    assert [v["name"] for v in report["variants"]] == ["fsdp+mixed", "zero3+mixed", "fsdp+low", "zero3+low"]
    assert FakeChild.most_open == 2
    assert FakeChild.devices["fsdp+mixed"] == "0,1"
    assert FakeChild.devices["zero3+mixed"] == "3,2"
    assert set(FakeChild.devices.values()) == {"0,1", "3,2"}
    assert FakeChild.open == []


def test_a_failure_ends_what_runs_beside_it(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(FakeChild, "faults", {"fsdp": RunError("rank 1 died")})
    monkeypatch.setattr(FakeChild, "ended", lambda self, seconds: self.engine == "fsdp")
    with pytest.raises(SamestepError, match=r"variant fsdp\+mixed: rank 1 died"):
        compared(recipe, tmp_path / "out", device_sets=["0,1", "2,3"])
    assert FakeChild.started == ["fsdp+mixed", "zero3+mixed"]
    assert FakeChild.open == []


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["0,1", "2,4"], r"--devices 2,4: '4' is no device of this machine, which has 4"),
        (["0,x"], "'x' is no device"),
        (["0,1", "1,2"], "--devices 1,2: device 1 is given twice"),
        (["0,0"], "device 0 is given twice"),
        (["0"], "1 devices are too few for 2 ranks"),
    ],
)
def test_sets_that_cannot_be(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: list[str], message: str
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    with pytest.raises(EngineError, match=message) as caught:
        compared(recipe, tmp_path / "out", device_sets=sets)
    assert caught.value.exit_code == 2
    assert FakeChild.started == []


def test_an_interrupted_variant_is_not_compared(recipe: Recipe, tmp_path: Path) -> None:
    FakeChild.faults = {"zero3": "interrupted"}
    with pytest.raises(RunError, match=r"variant zero3\+mixed: the run was interrupted after 2 steps"):
        compared(recipe, tmp_path / "c")


def test_nothing_runs_when_one_variant_is_faulty(recipe: Recipe, tmp_path: Path) -> None:
    prefetching = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"forward_prefetch": 1})})
    with pytest.raises(SamestepError, match=r"zero3\+mixed: engine.forward_prefetch"):
        compared(prefetching, tmp_path / "c")
    assert FakeChild.started == []
    assert not (tmp_path / "c").exists()


def test_nothing_runs_when_the_guard_refuses_a_later_variant(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(each: Recipe) -> None:
        if each.precision.regime == "low":
            raise PrecisionError("98% of the updates would be lost", where="precision.regime")

    monkeypatch.setattr(guard, "refuse_recipe", refuse)
    with pytest.raises(PrecisionError, match=r"variant fsdp\+low: precision.regime: 98% of the updates") as caught:
        compared(recipe, tmp_path / "out")
    assert caught.value.exit_code == 2
    assert FakeChild.started == []
    assert list((tmp_path / "out").iterdir()) == []


def test_nothing_runs_without_matplotlib(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    with pytest.raises(SamestepError, match=r"samestep\[plots\]"):
        compared(recipe, tmp_path / "c", picture=True)
    assert FakeChild.started == []
    assert not (tmp_path / "c").exists()
    assert compared(recipe, tmp_path / "c")["ok"]


def test_nothing_runs_under_torchrun(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SamestepError, match="without torchrun"):
        compared(recipe, tmp_path / "c")
    assert FakeChild.started == []


def test_results_are_not_replaced_unasked(recipe: Recipe, tmp_path: Path) -> None:
    compared(recipe, tmp_path / "c")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(OutputError, match="not empty"):
        compared(recipe, tmp_path / "c")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_overwrite_leaves_nothing_of_other_variants(recipe: Recipe, tmp_path: Path) -> None:
    compared(recipe, tmp_path / "c", picture=True)
    run.compare(recipe, ["ddp", "fsdp"], ["full"], tmp_path / "c", json_output=True, picture=False, overwrite=True)
    left = sorted(path.name for path in (tmp_path / "c").iterdir())
    ours = ["compare.html", "compare.json", "ddp+full", "ddp+full.log", "fsdp+full", "fsdp+full.log", "variants.json"]
    assert left == ours


@pytest.mark.parametrize("name", ["notes.txt", "fsdp+mixed/notes.txt", "mine/notes.txt", "other.log"])
def test_overwrite_never_removes_what_is_not_ours(recipe: Recipe, tmp_path: Path, name: str) -> None:
    compared(recipe, tmp_path / "c")
    (tmp_path / "c" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "c" / name).write_text("precious")
    with pytest.raises(OutputError, match="the folder holds"):
        compared(recipe, tmp_path / "c", overwrite=True)
    assert (tmp_path / "c" / name).read_text() == "precious"
    assert len(FakeChild.started) == 4


def test_a_place_that_cannot_be_a_folder(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        compared(recipe, tmp_path / "file" / "c")
    assert FakeChild.started == []


def test_what_people_see(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared(recipe, tmp_path / "c", json_output=False, picture=True)
    printed = capsys.readouterr()
    assert "fsdp+mixed and zero3+mixed are bit-equal over 2 steps" in printed.out
    assert "compare.png" in printed.out
    lines = printed.err.splitlines()
    assert lines[0] == "variant 1 of 4  fsdp+mixed"
    assert lines[-1] == "variant 4 of 4  zero3+low  2 steps, last loss 3.5000"
    compared(recipe, tmp_path / "d")
    assert capsys.readouterr().out == ""


def test_the_table(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=100).print(table(compared(recipe, tmp_path / "c")))
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "4.0000" in line]
    assert rows == [
        ["fsdp", "mixed", "4.0000", "3.0000", "5.0000", "4.5000", "(itself)", "0.0", "%"],
        ["zero3", "mixed", "4.0000", "3.0000", "5.0000", "4.5000", "yes", "0.0", "%"],
        ["fsdp", "low", "4.0000", "3.5000", "5.0000", "4.5000", "no:", "step", "2,", "loss", "50.0", "%"],
        ["zero3", "low", "4.0000", "3.5000", "5.0000", "4.5000", "no:", "step", "2,", "loss", "50.0", "%"],
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0.0 %"), (0.0004, "< 0.1 %"), (0.42, "42.0 %"), (0.9996, "> 99.9 %"), (1.0, "100.0 %")],
)
def test_shares_for_people(value: float | None, text: str) -> None:
    assert share(value) == text


def test_the_picture(recipe: Recipe, tmp_path: Path) -> None:
    compared(recipe, tmp_path / "c", picture=True)
    content = (tmp_path / "c" / "compare.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert not list(tmp_path.rglob("*.partial"))


def test_variants_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(GOOD)
    line = ["compare", "r.yaml", "--variants", "fsdp+mixed, zero3+low", "--out", "c", "--json", "--no-picture"]
    assert cli.main(line) == 0
    report = json.loads(capsys.readouterr().out)
    assert [v["name"] for v in report["variants"]] == ["fsdp+mixed", "zero3+low"]
    FakeChild.faults = {"zero3": 0.5}
    assert cli.main(["compare", "r.yaml", "--engines", "fsdp,zero3", "--out", "d", "--json", "--no-picture"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert cli.main(["compare", "r.yaml", "--variants", "fsdp+mixed", "--out", "e"]) == 2
    assert "at least two variants" in capsys.readouterr().err
    assert cli.main(["compare", "r.yaml", "--engines", "fsdp,zero3", "--out", "d"]) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_the_recipes_own_engine_need_not_be_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(GOOD.replace("{ranks: 2}", "{name: hsdp, ranks: 2}"))
    line = ["compare", "r.yaml", "--engines", "fsdp,zero3", "--ranks", "1", "--out", "c", "--json", "--no-picture"]
    assert cli.main(line) == 0


def test_the_comparison_of_records_needs_no_torch() -> None:
    program = (
        "import sys, samestep.compare.run, samestep.compare.verdict, samestep.compare.variants\n"
        "print([name for name in ('torch', 'matplotlib', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_killed_comparison_goes_on(recipe: Recipe, tmp_path: Path) -> None:
    FakeChild.faults = {"zero3": RunError("killed")}
    with pytest.raises(SamestepError):
        compared(recipe, tmp_path / "c")
    FakeChild.faults = {}
    (tmp_path / "c" / "zero3+mixed" / "summary.json").unlink()
    FakeChild.started = []
    report = compared(recipe, tmp_path / "c", resume=True)
    assert FakeChild.started == ["zero3+mixed", "fsdp+low", "zero3+low"]
    assert FakeChild.resumed == []
    assert report["ok"]
    FakeChild.started = []
    assert compared(recipe, tmp_path / "c", resume=True) == report
    assert FakeChild.started == []


def test_a_run_with_a_checkpoint_goes_on_from_it(recipe: Recipe, tmp_path: Path) -> None:
    FakeChild.faults = {"zero3": "interrupted"}
    with pytest.raises(RunError, match="--resume"):
        compared(recipe, tmp_path / "c")
    FakeChild.faults = {}
    checkpoint = tmp_path / "c" / "zero3+mixed" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    compared(recipe, tmp_path / "c", resume=True)
    assert FakeChild.resumed == ["zero3+mixed"]


@pytest.mark.parametrize("damage", ["lines", "summary", "precision"])
def test_a_run_that_is_not_whole_starts_anew(recipe: Recipe, tmp_path: Path, damage: str) -> None:
    compared(recipe, tmp_path / "c", keep_masters=True)
    (tmp_path / "c" / "compare.json").unlink()
    run_folder = tmp_path / "c" / "fsdp+low"
    if damage == "lines":
        lines = (run_folder / "steps.jsonl").read_text().splitlines()
        (run_folder / "steps.jsonl").write_text(lines[0] + "\n")
    else:
        (run_folder / f"{damage}.json").unlink()
    FakeChild.started = []
    compared(recipe, tmp_path / "c", resume=True)
    assert FakeChild.started == ["fsdp+low"]


def test_a_run_is_known_by_its_recipe_and_not_by_its_name(recipe: Recipe, tmp_path: Path) -> None:
    compared(recipe, tmp_path / "c")
    other = recipe.model_copy(update={"train": recipe.train.model_copy(update={"micro_batch": 4})})
    with pytest.raises(OutputError, match=r"is not of the variant fsdp\+mixed: train\.micro_batch is 8 in one and 4"):
        compared(other, tmp_path / "c", resume=True)
    held = tmp_path / "c" / "fsdp+mixed" / "recipe.yaml"
    held.write_text(held.read_text().replace("micro_batch: 8", "micro_batch: 2"))
    with pytest.raises(OutputError, match=r"train\.micro_batch is 8 in one and 2"):
        compared(recipe, tmp_path / "c", resume=True)


def test_nothing_to_go_on_with(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no comparison to go on with"):
        compared(recipe, tmp_path / "c", resume=True)


def test_several_seeds(recipe: Recipe, tmp_path: Path) -> None:
    variants = expand([("fsdp", "mixed"), ("fsdp", "low")], [], [0, 1])
    report = run.compare_variants(recipe, variants, tmp_path / "c", json_output=True, picture=False)
    assert {(p["a"], p["b"]) for p in report["pairs"]} == {
        ("fsdp+mixed+seed=0", "fsdp+low+seed=0"),
        ("fsdp+mixed+seed=1", "fsdp+low+seed=1"),
    }
    # Losses are 4 and 3 against 4 and 3.5 with both seeds.
    assert report["arms"][0]["mean_loss_gap"] == {
        "mean": 0.25,
        "low": 0.25,
        "high": 0.25,
        "values": 2,
        "confidence": 0.95,
    }
    assert "over 2 seeds the loss of fsdp+low is on average 0.25 above fsdp+mixed" in report["verdict"]
