"""The Trainer's fsdp_config: what it reads of it, and what stands there in vain."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from samestep.migrate import Migration, MigrationError, migrate, read, read_as
from samestep.migrate.accelerate_table import ACCELERATE
from samestep.migrate.transformers_table import TRAINER_FSDP, TRAINER_NAMES

ARGUMENTS = {"output_dir": "o", "max_steps": 5, "bf16": True, "fsdp": True}


def run(folder: Path, config: dict[str, Any], kind: str = "transformers") -> Migration:
    (folder / "c.json").write_text(json.dumps(config))
    source = read(folder / "c.json")
    return migrate(source, read_as(kind, source, {}), "samestep", {})


def statuses(result: Migration) -> dict[str, str]:
    return {entry.path: entry.status for entry in result.fields}


def values(result: Migration, path: str) -> Any:
    return next(entry for entry in result.fields if entry.path == path).target_value


def test_the_trainer_reads_these_fields_and_no_others() -> None:
    training_args = pytest.importorskip("transformers.training_args")
    text = Path(sys.modules[training_args.__name__].__file__ or "").read_text()
    for row in TRAINER_FSDP:
        key = row.path.removeprefix("fsdp_config.").rstrip("*")
        read_there = f'"{key}"' in text.partition("def _process_fsdp_args")[2].partition("class ParallelMode")[0]
        assert read_there is not bool(row.ignored), key
    bare = {row.path.removeprefix("fsdp_config.fsdp_") for row in ACCELERATE if row.path.startswith("fsdp_config.fsdp")}
    assert bare | set(TRAINER_NAMES) == {row.path.removeprefix("fsdp_config.") for row in TRAINER_FSDP}


@pytest.mark.parametrize("key", ["offload_params", "sharding_strategy", "fsdp_ignored_modules"])
def test_what_the_trainer_does_not_hand_on_means_nothing(tmp_path: Path, key: str) -> None:
    config = {key: {"offload_params": True, "sharding_strategy": "NO_SHARD"}.get(key, "a"), "version": 1}
    whole = run(tmp_path, ARGUMENTS | {"fsdp_config": config})
    alone = run(tmp_path, config, "fsdp-config")
    for result, path in ((whole, f"fsdp_config.{key}"), (alone, key)):
        assert statuses(result)[path] == "not-needed"
        assert path in {finding.path for finding in result.problems}
        assert "name: fsdp\n" in result.text
        assert "offload: cpu" not in result.text


def test_a_strategy_of_fsdp1_is_not_what_runs(tmp_path: Path) -> None:
    plugin = pytest.importorskip("accelerate.utils").FullyShardedDataParallelPlugin
    # As the Trainer builds it.
    built = plugin(fsdp_version=1, reshard_after_forward="no_shard")
    assert built.sharding_strategy.name == "FULL_SHARD"
    result = run(tmp_path, ARGUMENTS | {"fsdp": "no_shard auto_wrap", "fsdp_config": {"version": 1}})
    assert "name: fsdp\n" in result.text
    assert "reshard_after_forward: true" in result.text
    assert any("no_shard is not what runs" in finding.what for finding in result.problems)


def test_old_words_say_what_they_say_under_fsdp2(tmp_path: Path) -> None:
    result = run(tmp_path, ARGUMENTS | {"fsdp": "shard_grad_op offload"})
    said = {"engine.name": "fsdp", "engine.reshard_after_forward": False, "engine.offload": "cpu"}
    assert values(result, "fsdp") == said


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"fsdp": "full_shard auto_wrp"}, "has no option 'auto_wrp'"),
        ({"fsdp": ["full_shard", 3]}, "has no option 3"),
        ({"fsdp": "hybrid_shard"}, "hybrid_shard is of FSDP1"),
        ({"fsdp_config": {"cpu_offload": True, "fsdp_cpu_offload": False}}, "fsdp_config.cpu_offload says the same"),
        ({"fsdp_config": {"transformer_layer_cls_to_wrap": [1]}}, r"expected a list of texts, got \[1\]"),
        ({"report_to": [0.5]}, r"expected a list of texts, got \[0.5\]"),
    ],
)
def test_what_the_trainer_refuses_is_refused(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(MigrationError, match=what):
        run(tmp_path, ARGUMENTS | changes)


@pytest.mark.parametrize(("key", "content"), [("deepspeed", {"gradient_clipping": 1.0}), ("fsdp_config", {})])
def test_the_name_of_a_file_is_a_field_too(tmp_path: Path, key: str, content: dict[str, Any]) -> None:
    (tmp_path / "beside.json").write_text(json.dumps(content))
    arguments = {"output_dir": "o", "max_steps": 5, key: "beside.json"}
    assert statuses(run(tmp_path, arguments))[key] == "computed"


def test_sections_that_do_not_run_are_not_read(tmp_path: Path) -> None:
    config = {"output_dir": "o", "max_steps": 5, "deepspeed": {}, "fsdp_config": {"reshard_after_forward": False}}
    assert statuses(run(tmp_path, config))["fsdp_config.reshard_after_forward"] == "not-needed"
