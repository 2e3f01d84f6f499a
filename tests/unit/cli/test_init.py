from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from samestep import cli
from samestep.recipe import load


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def in_a_terminal(monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[str]:
    """Answer the questions; the list is what remains unasked."""
    left = list(answers)

    def reply(*_: object) -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", reply)
    return left


def test_defaults_give_a_recipe_that_loads(folder: Path) -> None:
    assert cli.main(["init"]) == 0
    recipe = load(folder / "recipe.yaml")
    assert (recipe.name, recipe.engine.name, recipe.engine.ranks) == ("run", "fsdp", 2)
    assert os.listdir(folder) == ["recipe.yaml"]


def test_flags(folder: Path) -> None:
    flags = "--model m --data d.csv --format text --engine zero3 --precision low --ranks 4 --steps 7 --lr 3e-4"
    assert cli.main(["init", "story.yaml", *flags.split()]) == 0
    recipe = load(folder / "story.yaml")
    assert (recipe.name, recipe.model.path, recipe.data.path) == ("story", "m", str(folder / "d.csv"))
    assert (recipe.data.format, recipe.engine.name, recipe.engine.ranks) == ("text", "zero3", 4)
    assert (recipe.precision.regime, recipe.train.steps, recipe.train.optimizer.lr) == ("low", 7, 3e-4)


def test_single_has_one_rank_by_default(folder: Path) -> None:
    assert cli.main(["init", "--engine", "single"]) == 0
    assert load(folder / "recipe.yaml").engine.ranks == 1


def test_a_file_name_that_is_no_run_name(folder: Path) -> None:
    assert cli.main(["init", "my recipe.yaml"]) == 0
    assert load(folder / "my recipe.yaml").name == "run"


def test_never_overwrites_without_force(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "recipe.yaml").write_text("mine")
    assert cli.main(["init"]) == 2
    assert (folder / "recipe.yaml").read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert cli.main(["init", "--force", "--steps", "5"]) == 0
    assert load(folder / "recipe.yaml").train.steps == 5


def test_asks_in_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = in_a_terminal(monkeypatch, "my/model", "", "text", "ddp", "", "4", "abc", "0", "9", "1e-3")
    assert cli.main(["init"]) == 0
    recipe = load(folder / "recipe.yaml")
    assert (recipe.model.path, recipe.data.path) == ("my/model", str(folder / "data.jsonl"))
    assert (recipe.data.format, recipe.engine.name, recipe.engine.ranks) == ("text", "ddp", 4)
    assert (recipe.precision.regime, recipe.train.steps, recipe.train.optimizer.lr) == ("mixed", 9, 1e-3)
    assert left == []


def test_asks_only_for_what_no_flag_gives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = in_a_terminal(monkeypatch, "3", "1e-2")
    flags = "--model m --data d --format text --engine ddp --precision full --ranks 2"
    assert cli.main(["init", *flags.split()]) == 0
    assert left == []
    assert load(folder / "recipe.yaml").train.steps == 3


def test_end_of_input_writes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_a_terminal(monkeypatch, "my/model")
    assert cli.main(["init"]) == 130
    assert os.listdir(folder) == []
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("step", ["replace", "fsync", "chmod"])
def test_a_failing_disk_leaves_the_old_file_whole(
    step: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "recipe.yaml").write_text("mine")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    assert cli.main(["init", "--force"]) == 2
    assert os.listdir(folder) == ["recipe.yaml"]
    assert (folder / "recipe.yaml").read_text() == "mine"
    assert "recipe.yaml: cannot be written: No space left on device." in capsys.readouterr().err


def test_a_device_is_never_replaced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(folder / "pipe")
    assert cli.main(["init", "pipe", "--force"]) == 2
    assert "is not an ordinary file" in capsys.readouterr().err
    assert stat.S_ISFIFO((folder / "pipe").stat().st_mode)


def test_a_link_stays_a_link(folder: Path) -> None:
    (folder / "real.yaml").write_text("mine")
    (folder / "link.yaml").symlink_to("real.yaml")
    assert cli.main(["init", "link.yaml", "--force", "--steps", "5"]) == 0
    assert (folder / "link.yaml").is_symlink()
    assert load(folder / "real.yaml").train.steps == 5


def test_the_file_has_the_rights_of_any_new_file(folder: Path) -> None:
    (folder / "other").write_text("")
    assert cli.main(["init"]) == 0
    assert stat.S_IMODE((folder / "recipe.yaml").stat().st_mode) == stat.S_IMODE((folder / "other").stat().st_mode)
