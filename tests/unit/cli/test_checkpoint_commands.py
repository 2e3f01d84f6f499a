"""`samestep checkpoint inspect|verify|diff|export` as people meet them: what they print, exit codes, bad input."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from samestep import cli
from samestep.checkpoint import store
from samestep.checkpoint.manifest import encoded, read_manifest
from tests.unit.checkpoint import trained
from tests.unit.checkpoint.small import save, tensors


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The newest of two checkpoints of RUN."""
    save(tmp_path / "run" / "checkpoints", 3)
    return save(tmp_path / "run" / "checkpoints", 7)


Answer = tuple[int, str, str]


@pytest.fixture
def samestep(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Runs `samestep checkpoint ...`: exit code, standard output, standard error."""

    def run(*arguments: str | Path) -> Answer:
        code = cli.main(["checkpoint", *map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def refused(answer: Answer, *parts: str) -> None:
    """One short message, exit code 2, nothing on standard output."""
    code, out, err = answer
    assert (code, out) == (2, ""), err
    assert "Traceback" not in err
    assert len(err) < 400 and err.count("\n") < 4, err
    for part in parts:
        assert part in err


@pytest.mark.parametrize("place", [".", "run", "run/checkpoints", "run/checkpoints/step-00000007"])
def test_inspect_shows_what_is_inside(samestep: Any, checkpoint: Path, tmp_path: Path, place: str) -> None:
    if place == ".":
        place = str(checkpoint.relative_to(tmp_path))
    code, out, err = samestep("inspect", tmp_path / place)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == str(checkpoint)
    assert lines[1] == "step 7 (7 updates), 4 rows a step"
    assert lines[2] == "fsdp on 2 ranks, regime mixed"
    rows = {line.split("  ")[0]: line.split()[-5:] for line in lines[4:7]}
    assert rows["masters"] == ["2", "38", "bfloat16", "and", "float32"]
    assert rows["optimizer exp_avg"] == ["2", "38", "bfloat16", "and", "float32"]
    total = sum(path.stat().st_size for path in checkpoint.iterdir() if path.name != "manifest.json")
    assert lines[-1] == f"2 files, {total:,} bytes"


def test_inspect_for_machines(samestep: Any, checkpoint: Path) -> None:
    code, out, _ = samestep("inspect", checkpoint, "--json")
    assert code == 0
    assert json.loads(out) == {"checkpoint": str(checkpoint), **asdict(read_manifest(checkpoint))}


def test_verify_finds_nothing(samestep: Any, checkpoint: Path) -> None:
    assert samestep("verify", checkpoint) == (0, f"{checkpoint}: all 2 files are as they were written\n", "")
    code, out, _ = samestep("verify", checkpoint, "--json")
    assert (code, json.loads(out)) == (0, {"checkpoint": str(checkpoint), "files": 2, "damages": [], "ok": True})


def test_verify_names_what_is_damaged(samestep: Any, checkpoint: Path) -> None:
    data = checkpoint / "__0_0.distcp"
    os.truncate(data, 10)
    (checkpoint / ".metadata").unlink()
    code, out, err = samestep("verify", checkpoint)
    assert (code, err) == (1, "")
    missing, short = out.splitlines()
    assert missing == f"{checkpoint}: .metadata: No such file or directory"
    assert short.startswith(f"{checkpoint}: __0_0.distcp: has 10 bytes, but ")
    code, out, _ = samestep("verify", checkpoint, "--json")
    found = json.loads(out)
    assert (code, found["ok"], len(found["damages"])) == (1, False, 2)


def test_a_newest_one_without_manifest_is_named_not_passed_over(samestep: Any, checkpoint: Path) -> None:
    """It had one when it got its name: the one before is not the newest."""
    (checkpoint / "manifest.json").unlink()
    for place in (checkpoint, checkpoint.parent, checkpoint.parents[1]):
        for command in ("verify", "inspect"):
            refused(samestep(command, place), f"{checkpoint}: is damaged: manifest.json is missing", "delete this one")
    shutil.rmtree(checkpoint)
    assert store.newest(checkpoint.parent).name == "step-00000003"


def test_diff_of_equal_ones(samestep: Any, checkpoint: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other", 9, tensors(7))
    assert samestep("diff", checkpoint, other) == (0, "equal: every tensor, bit for bit\n", "")
    code, out, _ = samestep("diff", checkpoint, other, "--json")
    found = json.loads(out)
    assert (code, found["equal"], found["differences"]) == (0, True, [])


def test_diff_of_others(samestep: Any, checkpoint: Path, tmp_path: Path) -> None:
    changed = tensors(7)
    changed["model.w"][0, :3] += 0.25
    changed["model.b"][1] = torch.inf
    changed["model.new"] = torch.zeros(1)
    other = save(tmp_path / "other", 9, changed)
    code, out, err = samestep("diff", checkpoint, other)
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        "model.b: other values: 1 elements, largest gap not finite",
        "model.new: only in the second",
        "model.w: other values: 3 elements, largest gap 0.25",
    ]
    code, out, _ = samestep("diff", checkpoint, other, "--json")
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert code == 1
    assert found["differences"][0] == {"name": "model.b", "what": "other values", "gap": None, "elements": 1}


def _unfinished(folder: Path) -> Path:
    return folder.rename(folder.with_name(f".{folder.name}.partial"))


def _empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def _foreign(folder: Path) -> Path:
    """As DeepSpeed leaves it."""
    shutil.rmtree(folder)
    (folder / "global_step7").mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    return folder


def _without_manifest(folder: Path) -> Path:
    (folder / "manifest.json").unlink()
    return folder


def _manifest(text: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "manifest.json").write_text(text)
        return folder

    return write


def _unreadable(folder: Path) -> Path:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to("manifest.json")
    return folder


def _altered(folder: Path) -> Path:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"ranks": 2', '"ranks": 4'))
    return folder


def _forged(**changes: Any) -> Callable[[Path], Path]:
    """A manifest whose digest fits, and that says what cannot be."""

    def write(folder: Path) -> Path:
        (folder / "manifest.json").write_text(encoded(replace(read_manifest(folder), **changes)))
        return folder

    return write


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing there": (lambda folder: folder / "no", "is not there"),
    "a file": (lambda folder: folder / ".metadata", "is a file, not a folder"),
    "an empty folder": (_empty, "has no complete checkpoint"),
    "unfinished": (_unfinished, "was never finished"),
    "foreign": (_foreign, "is damaged: manifest.json is missing"),
    "no manifest": (_without_manifest, "is damaged: manifest.json is missing"),
    "no JSON": (_manifest("{"), "manifest.json: cannot be read"),
    "deep JSON": (_manifest("[" * 100_000), "manifest.json: cannot be read"),
    "bytes": (_manifest("\x00\x01"), "manifest.json: cannot be read"),
    "a list": (_manifest("[1]"), "is not a manifest of samestep"),
    "of others": (_manifest('{"format": "theirs"}'), "is not a manifest of samestep"),
    "newer": (_manifest('{"format": "samestep", "version": 2}'), "has format version 2, but this samestep reads"),
    "no version": (_manifest('{"format": "samestep"}'), "has format version None"),
    "version 0": (_manifest('{"format": "samestep", "version": 0}'), "has format version 0"),
    "no number": (_manifest('{"format": "samestep", "version": 1, "step": NaN, "sha256": ""}'), "is damaged"),
    "altered": (_altered, "is damaged: its own digest does not fit"),
    "unreadable": (_unreadable, "is damaged: manifest.json is missing"),
    "a step that is none": (_forged(step="7"), "cannot be used: step:"),
    "tensors that are none": (_forged(tensors={"model.w": {"shape": "x"}}), "cannot be used: tensors"),
    "a size below zero": (_forged(tensors={"w": {"shape": [-1], "dtype": "float32"}}), "has no such tensor: w is"),
    "a strange dtype": (_forged(tensors={"w": {"shape": [1], "dtype": "save"}}), "has no such tensor: w is save"),
    "a file elsewhere": (_forged(files={"../../secret": {"bytes": 1, "sha256": ""}}), "points outside of its folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("command", ["inspect", "verify", "diff", "export"])
def test_bad_input(samestep: Any, checkpoint: Path, tmp_path: Path, command: str, name: str) -> None:
    good = tmp_path / "good"
    shutil.copytree(checkpoint, good)
    make, what = BAD[name]
    place = make(checkpoint)
    more = {"diff": [good], "export": ["--out", tmp_path / "out"]}.get(command, [])
    refused(samestep(command, place, *more), what, str(checkpoint.parent))
    if command in ("inspect", "verify", "diff"):
        refused(samestep(command, place, *more, "--json"), what)
    if command == "diff":
        refused(samestep("diff", good, place), what)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_may_not_be_read(samestep: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    run = checkpoint.parents[1]
    monkeypatch.setattr(Path, "iterdir", denied)
    refused(samestep("inspect", run), "cannot be read: Permission denied", str(run))


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "metadata"])
def test_diff_of_a_damaged_one(samestep: Any, checkpoint: Path, tmp_path: Path, damage: str) -> None:
    good = tmp_path / "good"
    shutil.copytree(checkpoint, good)
    data = checkpoint / "__0_0.distcp"
    if damage == "flip":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 0xFF
        data.write_bytes(content)
    elif damage == "cut":
        os.truncate(data, 20)
    elif damage == "remove":
        data.unlink()
    else:
        (checkpoint / ".metadata").write_bytes(b"\x80\x04")
    refused(samestep("diff", good, checkpoint), "is damaged: ", str(checkpoint))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = trained.source(tmp_path / "model")
    trained.checkpoint(tmp_path / "run", trained.recipe_of({"path": str(path)}))
    return tmp_path / "run"


def test_export(samestep: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = samestep("export", "run", "--out", "a/model", "--dtype", "bfloat16", "--max-shard-size", "5KB")
    assert (code, out) == (0, "run/checkpoints/step-00000001 is a model now: a/model\n")
    assert len(list((tmp_path / "a" / "model").glob("*.safetensors"))) == 2
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "model", dtype="auto").dtype == torch.bfloat16


def test_export_refuses(samestep: Any, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(samestep("export", run), "--out")
    refused(samestep("export", run, "--out", out, "--dtype", "float8"), "'float8' is not one of")
    refused(samestep("export", run, "--out", out, "--max-shard-size", "big"), "--max-shard-size")
    refused(samestep("export", run, "--out", out, "--max-shard-size", "0GB"), "--max-shard-size")
    refused(samestep("export", run, "--out", out, "--merge"), "has no adapters to merge")
    refused(samestep("export", run, "--out", run / "checkpoints" / "latest" / "x"), "cannot be written")
    refused(samestep("export", run, "--out", run), "is there already")
    refused(samestep("export", run, "--out", run, "--overwrite"), "is not a model's folder")
    assert not out.exists()
    assert store.newest(run).name == "step-00000001"


def test_export_without_its_model(samestep: Any, run: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "model")
    refused(samestep("export", run, "--out", tmp_path / "out"), "there is no folder")
    assert not (tmp_path / "out").exists()


def test_export_of_a_damaged_one(samestep: Any, run: Path, tmp_path: Path) -> None:
    data = store.newest(run) / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    refused(samestep("export", run, "--out", tmp_path / "out"), "is damaged: __0_0.distcp")
    assert not (tmp_path / "out").exists()


def test_export_of_a_recipe_of_another_version(samestep: Any, run: Path, tmp_path: Path) -> None:
    folder = store.newest(run)
    manifest = read_manifest(folder)
    _forged(recipe=manifest.recipe | {"quantum": True})(folder)
    refused(samestep("export", run, "--out", tmp_path / "out"), "holds a recipe that this version does not know")
