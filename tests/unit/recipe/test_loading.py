from __future__ import annotations

import os
from pathlib import Path

import pytest

from samestep.errors import RecipeError
from samestep.recipe import OffloadParts, load, resolved_text

GOOD = """\
model: {path: models/tiny, tokenizer: ../tok}
data: {path: rows.jsonl, held_out: held/out.jsonl}
train: {steps: 3}
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path | str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(path, overrides)
    return str(caught.value)


def test_paths_are_relative_to_the_recipes_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recipes"
    file = write(folder / "a.yaml", GOOD)
    (folder / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    recipe = load(Path("recipes") / "a.yaml")
    assert load(file) == recipe
    assert recipe.model.path == str(folder / "models" / "tiny")
    assert recipe.model.tokenizer == str(tmp_path / "tok")
    assert recipe.data.path == str(folder / "rows.jsonl")
    assert recipe.data.held_out == str(folder / "held" / "out.jsonl")


def test_a_model_that_is_no_folder_here_is_a_hub_id(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", GOOD)
    assert load(file).model.path == "models/tiny"
    assert load(file, ["model.path=./models/tiny"]).model.path == str(tmp_path / "models" / "tiny")
    assert load(file, ["model.path=/models/tiny"]).model.path == "/models/tiny"
    home = os.path.expanduser("~")
    assert load(file, ["model.path='~/tiny'"]).model.path == os.path.join(home, "tiny")


def test_hub_data_and_numbers_of_rows_are_no_paths(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", GOOD)
    recipe = load(file, ["data.path={hub: openai/gsm8k, name: main}", "data.held_out=5"])
    assert recipe.data.held_out == 5
    assert not isinstance(recipe.data.path, str)
    assert recipe.data.path.hub == "openai/gsm8k"


def test_the_nvme_folder_is_relative_to_the_recipes_folder_too(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", GOOD)
    recipe = load(file, ["engine.name=zero3", "engine.offload={optimizer: nvme, nvme_path: disk}"])
    assert recipe.engine.offload == OffloadParts(optimizer="nvme", nvme_path=str(tmp_path / "disk"))


def test_the_resolved_recipe_loads_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    recipe = load(write(tmp_path / "a.yaml", GOOD))
    assert load(write(tmp_path / "runs" / "x" / "recipe.yaml", resolved_text(recipe))) == recipe


def test_numbers_of_every_spelling(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", GOOD)
    for text, value in (("1e-4", 1e-4), ("1E-4", 1e-4), ("0.0001", 1e-4), ("1.0e-04", 1e-4), ("2", 2.0)):
        lr = load(file, [f"train.optimizer.lr={text}"]).train.optimizer.lr
        assert lr == value
        assert isinstance(lr, float)


def test_a_byte_order_mark_and_windows_line_ends_do_not_matter(tmp_path: Path) -> None:
    expected = load(write(tmp_path / "a.yaml", GOOD))
    (tmp_path / "b.yaml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load(tmp_path / "b.yaml") == expected


def test_json_is_yaml(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", '{"model": {"path": "m"}, "data": {"path": "d"}, "train": {"steps": 2}}')
    assert load(file).train.steps == 2


def test_missing_file(tmp_path: Path) -> None:
    write(tmp_path / "recipe.yaml", GOOD)
    missing = tmp_path / "recipes.yaml"
    assert refusal(missing) == f"{missing}: no such file - did you mean recipe.yaml?"
    assert refusal(tmp_path / "no" / "folder.yaml").endswith("folder.yaml: no such file")


def test_a_folder(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path}: is a folder; give the recipe file in it"


def test_a_file_as_folder(tmp_path: Path) -> None:
    assert "cannot be read: Not a directory" in refusal(write(tmp_path / "a.yaml", GOOD) / "b.yaml")


def test_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"name: a\nmodel: \xff\n")
    assert refusal(tmp_path / "a.yaml") == f"{tmp_path / 'a.yaml'}:2: is not UTF-8 text"


def test_a_file_too_large_to_be_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"#" * (1 << 20) + b"\n")
    assert "larger than 1 MiB" in refusal(tmp_path / "a.yaml")


def test_a_name_that_no_file_can_have() -> None:
    assert "cannot be read" in refusal("a\0b.yaml")
    assert "cannot be read" in refusal("a" * 5000)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", GOOD)
    file.chmod(0)
    assert "cannot be read: Permission denied" in refusal(file)


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "r.yaml")
    with pytest.raises(RecipeError, match="is a pipe, not a file"):
        load(tmp_path / "r.yaml")
