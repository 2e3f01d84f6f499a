"""Configurations with what each must become, field by field. The expectations are written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from samestep.migrate import TARGETS, Migration, MigrationError, migrate, read, read_as, recognise
from samestep.recipe import parse

CORPUS = Path(__file__).parent / "corpus"
FILES = sorted(path.name for path in CORPUS.iterdir() if path.is_file())
STATUSES = {"kept", "renamed", "computed", "not-needed", "lossy", "impossible"}
REST = {"model.path": "m", "data.path": "d.jsonl", "train.steps": 100, "train.micro_batch": 1, "train.accumulation": 1,
        "train.optimizer.lr": 1e-4, "engine.ranks": 4, "precision.regime": "mixed"}  # fmt: skip


def expected(name: str) -> dict[str, Any]:
    return YAML(typ="safe", pure=True).load(CORPUS / "expected" / f"{name}.yaml")


def migrated(name: str, target: str, given: dict[str, Any]) -> Migration:
    source = read(CORPUS / name)
    kind = recognise(source, None, lambda question, kinds: None)
    return migrate(source, read_as(kind, source, given), target, given)


GOOD = [name for name in FILES if "error" not in expected(name)]
BAD = [name for name in FILES if "error" in expected(name)]


def test_the_corpus_is_large_enough() -> None:
    assert len(FILES) >= 40


@pytest.mark.parametrize("name", GOOD)
def test_every_field_becomes_what_it_must(name: str) -> None:
    want = expected(name)
    result = migrated(name, "samestep", want.get("set", {}))
    assert result.kind == want["kind"]
    assert {entry.path: entry.status for entry in result.fields} == want["fields"]
    assert {finding.path: finding.severity for finding in result.problems} == want["problems"]
    defaults = {entry.path: entry.status for entry in result.defaults}
    assert want.get("defaults", {}).items() <= defaults.items()
    if "missing" in want:
        assert list(result.missing) == want["missing"]


@pytest.mark.parametrize("name", GOOD)
def test_the_recipe_says_what_it_must(name: str) -> None:
    want = expected(name)
    text = migrated(name, "samestep", want.get("set", {})).text
    recipe = YAML(typ="safe", pure=True).load(text)
    for path, value in want.get("recipe", {}).items():
        place = recipe
        for key in path.split("."):
            place = place[key]
        assert place == value, path


@pytest.mark.parametrize("name", BAD)
def test_a_contradiction_is_refused_by_name(name: str) -> None:
    want = expected(name)
    with pytest.raises(MigrationError) as refusal:
        migrated(name, "samestep", want.get("set", {}))
    assert want["error"] in str(refusal.value)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", GOOD)
def test_every_field_is_in_the_report_once(name: str, target: str) -> None:
    given = expected(name).get("set", {})
    result = migrated(name, target, given)
    paths = [entry.path for entry in result.fields]
    assert len(paths) == len(set(paths))
    assert set(paths) == set(expected(name)["fields"])
    for entry in (*result.fields, *result.defaults):
        assert entry.status in STATUSES
        assert entry.rule
    if target == "samestep":
        assert all(entry.status != "kept" or entry.target_path for entry in result.fields)


@pytest.mark.parametrize("name", GOOD)
def test_with_what_is_missing_the_recipe_is_valid(name: str) -> None:
    given = expected(name).get("set", {})
    lacking = migrated(name, "samestep", given).missing
    given |= {path: value for path, value in REST.items() if path in lacking}
    given |= {"engine.shard_ranks": 2} if "engine.shard_ranks" in lacking else {}
    given |= {"train.optimizer.weight_decay": 0.0} if "train.optimizer.weight_decay" in lacking else {}
    result = migrated(name, "samestep", given)
    assert result.missing == ()
    recipe = parse(result.text)
    for path, value in given.items():
        place: Any = recipe
        for key in path.split("."):
            place = getattr(place, key)
        assert place == value
