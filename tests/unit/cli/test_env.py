from __future__ import annotations

import json
import os
import sys
from importlib import metadata

import pytest

from samestep import cli
from samestep.cli.env import environment


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["torch"] == metadata.version("torch")
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert set(found["backends"]) == {"gloo", "nccl"}
    assert isinstance(found["devices"], list)


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    assert metadata.version("transformers") in text
    assert "gloo" in text


def test_missing_extras_are_shown_as_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = metadata.version

    def version(package: str) -> str:
        if package == "deepspeed":
            raise metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(metadata, "version", version)
    assert environment()["packages"]["deepspeed"] is None
    assert cli.main(["env"]) == 0
    (row,) = [row for row in capsys.readouterr().out.splitlines() if "deepspeed" in row]
    assert row.split() == ["deepspeed", "-"]


def test_a_torch_that_cannot_be_loaded_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = environment()
    assert "torch" in found["torch_problem"]
    assert "devices" not in found
