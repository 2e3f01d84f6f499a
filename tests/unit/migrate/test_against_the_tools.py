"""The tables against the packages themselves: no field is unknown, no default is another one."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from samestep.migrate import MigrationError, migrate, read, read_as, recognise
from samestep.migrate.accelerate_table import ACCELERATE
from samestep.migrate.deepspeed_table import DEEPSPEED
from samestep.migrate.rows import Table
from samestep.migrate.transformers_table import TRANSFORMERS

CORPUS = Path(__file__).parent / "corpus"
DEEPSPEED_FILES = ["ds_bf16_stage3.json", "ds_fp16.json", "ds_optimizer_linear.json", "ds_texts.json", "acc_fsdp1.yaml",
                   "acc_deepspeed_defaults.yaml", "acc_ddp.yaml", "recipe.yaml", "titan_hsdp.toml"]  # fmt: skip
GIVEN = {"train.max_grad_norm": 0.5, "train.micro_batch": 2}


def rows_of(table: Table, prefix: str) -> dict[str, Any]:
    return {row.path.removeprefix(prefix): row.default for row in table if row.path.startswith(prefix)}


@pytest.mark.parametrize(
    ("prefix", "module", "name"),
    [
        ("zero_optimization.", "deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
        (
            "zero_optimization.offload_param.",
            "deepspeed.runtime.zero.offload_config",
            "DeepSpeedZeroOffloadParamConfig",
        ),
        (
            "zero_optimization.offload_optimizer.",
            "deepspeed.runtime.zero.offload_config",
            "DeepSpeedZeroOffloadOptimizerConfig",
        ),
        ("bf16.", "deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
        ("fp16.", "deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
    ],
)
def test_deepspeed_has_these_fields_and_defaults(prefix: str, module: str, name: str) -> None:
    config = getattr(pytest.importorskip(module), name)
    for field, info in config.model_fields.items():
        path = f"{prefix}{info.alias or field}"
        if "offload_" in field or field in ("zenflow", "leaf_module"):
            continue
        row = DEEPSPEED.find(path)
        assert row is not None, path
        if row.default is not None:
            want = getattr(info.default, "value", info.default)
            assert row.default == want, path


def test_the_keys_of_a_deepspeed_json_have_rows() -> None:
    constants = pytest.importorskip("deepspeed.runtime.constants")
    for name in ("TRAIN_BATCH_SIZE", "TRAIN_MICRO_BATCH_SIZE_PER_GPU", "GRADIENT_ACCUMULATION_STEPS", "STEPS_PER_PRINT",
                 "GRADIENT_CLIPPING", "COMMUNICATION_DATA_TYPE", "PRESCALE_GRADIENTS", "GRADIENT_PREDIVIDE_FACTOR",
                 "GRADIENT_ALLREDUCE_OP", "DISABLE_ALLGATHER", "ZERO_ALLOW_UNTESTED_OPTIMIZER",
                 "ZERO_FORCE_DS_CPU_OPTIMIZER", "MANAGED_GRADIENT_ACCUMULATION", "LOG_LEVEL"):  # fmt: skip
        row = DEEPSPEED.find(getattr(constants, name))
        assert row is not None
        default = getattr(constants, f"{name}_DEFAULT", None)
        if row.default is not None and default is not None:
            assert row.default == default, name


def test_the_trainer_has_these_arguments_and_defaults() -> None:
    arguments = pytest.importorskip("transformers").TrainingArguments
    for field in dataclasses.fields(arguments):
        row = TRANSFORMERS.find(field.name) or TRANSFORMERS.find(f"{field.name}.split_batches")
        assert row is not None, field.name
        if row.default is not None and field.default is not dataclasses.MISSING:
            assert row.default == getattr(field.default, "value", field.default), field.name


def test_the_launcher_has_these_keys() -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    known = {row.path.split(".")[0].rstrip("*") for row in ACCELERATE}
    for field in dataclasses.fields(config_args.ClusterConfig):
        assert field.name in known, field.name


def test_the_launchers_flags_have_rows() -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    flags = {action.dest for action in launch.launch_command_parser()._actions}
    fsdp = {f"fsdp_config.{flag}" for flag in flags if flag.startswith("fsdp_")}
    deepspeed = {"zero_stage", "offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path",
                 "offload_param_nvme_path", "gradient_accumulation_steps", "gradient_clipping", "zero3_init_flag",
                 "zero3_save_16bit_model", "deepspeed_config_file"}  # fmt: skip
    assert deepspeed <= flags
    assert {path for path in fsdp if ACCELERATE.find(path) is None} == set()
    assert {name for name in deepspeed if ACCELERATE.find(f"deepspeed_config.{name}") is None} == set()


def converted(name: str, target: str) -> str:
    source = read(CORPUS / name)
    kind = recognise(source, None, lambda question, kinds: None)
    return migrate(source, read_as(kind, source, dict(GIVEN)), target, dict(GIVEN)).text


@pytest.mark.parametrize("name", DEEPSPEED_FILES)
def test_deepspeed_takes_the_json(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    data = json.loads(converted(name, "deepspeed"))
    data.pop("train_batch_size", None)
    read_back = config.DeepSpeedConfig(data)
    assert read_back.gradient_clipping == data["gradient_clipping"]
    assert read_back.zero_config.stage == data.get("zero_optimization", {}).get("stage", 0)
    assert read_back.bfloat16_config.enabled == data.get("bf16", {}).get("enabled", False)
    assert read_back.gradient_accumulation_steps == data.get("gradient_accumulation_steps", 1)


@pytest.mark.parametrize("target", ["accelerate-fsdp", "accelerate-deepspeed"])
@pytest.mark.parametrize("name", DEEPSPEED_FILES)
def test_accelerate_takes_the_yaml(name: str, target: str, tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    deepspeed = pytest.importorskip("accelerate.utils.deepspeed")
    file = tmp_path / "config.yaml"
    file.write_text(converted(name, target))
    config = config_args.ClusterConfig.from_yaml_file(str(file))
    if target == "accelerate-deepspeed":
        inside = deepspeed.HfDeepSpeedConfig(config.deepspeed_config["deepspeed_config_file"])
        assert inside.config["gradient_clipping"] == json.loads(converted(name, "deepspeed"))["gradient_clipping"]
    elif config.distributed_type.value == "FSDP":
        assert config.fsdp_config["fsdp_version"] == 2
    assert os.path.exists(file)


def test_a_value_that_is_no_number_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_micro_batch_size_per_gpu": NaN}')
    with pytest.raises(MigrationError, match="NaN"):
        read(file)
