"""Headers and samples of safetensors files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from samestep import weight_files
from samestep.errors import ModelError


def test_headers(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 3, dtype=torch.bfloat16), "ids": torch.arange(4)}, tmp_path / "model.safetensors")
    found = weight_files.tensors(tmp_path)
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {"a": (torch.bfloat16, (2, 3))}
    assert weight_files.first_dtype(tmp_path) == torch.bfloat16


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    assert weight_files.tensors(tmp_path) == {}
    assert weight_files.first_dtype(tmp_path) is None


def test_only_the_files_that_the_index_names(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"stale": torch.zeros(2)}, tmp_path / "other.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    found = weight_files.tensors(tmp_path)
    assert set(found) == {"a", "b"}
    read = {t.name: values.tolist() for t, values in weight_files.samples(list(found.values()), limit=10)}
    assert read == {"a": [0.0, 0.0], "b": [1.0, 1.0]}


def test_samples_are_every_kth_element(tmp_path: Path) -> None:
    save_file({"a": torch.arange(100.0).reshape(10, 10)}, tmp_path / "model.safetensors")
    ((_, values),) = weight_files.samples(list(weight_files.tensors(tmp_path).values()), limit=25)
    assert values.tolist() == list(range(0, 100, 4))


def test_large_tensors_are_read_in_places_spread_over_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "_WHOLE", 640)
    save_file({"a": torch.arange(1000.0).repeat_interleave(10).reshape(1000, 10)}, tmp_path / "model.safetensors")
    ((_, values),) = weight_files.samples(list(weight_files.tensors(tmp_path).values()), limit=10**6)
    assert values.numel() == 640
    rows = sorted(set(values.tolist()))
    assert rows[0] == 0 and rows[-1] == 999
    assert max(b - a for a, b in itertools.pairwise(rows)) < 1000 / 15 + 1


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"{not a header}"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="cannot be read") as error:
        weight_files.tensors(tmp_path)
    assert error.value.where == str(tmp_path / "model.safetensors")


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_named(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="index of weights"):
        weight_files.tensors(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ModelError) as error:
        weight_files.tensors(tmp_path)
    assert error.value.where == str(tmp_path / "gone.safetensors")


def test_the_folder_of_a_hub_model_is_one_with_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache may have the index and only some of the files that it names."""
    monkeypatch.setattr(weight_files, "cached_file", lambda path, name, **_: str(tmp_path / name))
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    assert weight_files.folder_of("some/model") is None
    save_file({"b": torch.zeros(2)}, tmp_path / "two.safetensors")
    assert weight_files.folder_of("some/model") == tmp_path
    assert weight_files.folder_of(str(tmp_path)) == tmp_path
