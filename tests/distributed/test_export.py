"""The trained model as people load it: the same bytes from every engine, whole, tied and in the dtype asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from samestep.recipe import Recipe
from tests.distributed import run_jobs
from tests.small_runs import make_model, make_tokenizer, write_rows

if TYPE_CHECKING:
    from tests.distributed.ranks import RankPools

ENGINES = ["single", "fsdp", "zero1", "zero3"]
CASES: dict[str, dict[str, Any]] = {
    "bf16": {"model.load_dtype": "bfloat16"},
    "bf16 to fp32": {"model.load_dtype": "bfloat16", "precision.export_dtype": "float32"},
    "fp32 with frozen weights": {"model.freeze": ["model.layers.0.*", "model.norm.*"]},
    "trained in fp32": {"model.load_dtype": "bfloat16", "precision.regime": "full", "data.held_out": 3},
    "stochastic": {
        "model.load_dtype": "bfloat16",
        "precision.regime": "mixed-stochastic",
        "train.optimizer": {"lr": 1e-4},
        "data.held_out": 3,
    },
    "lora": {"model.lora": {"rank": 2, "alpha": 6.0, "target_modules": ["q_proj", "down_proj"]}},
}
Export = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and an fp32 model, most of whose weights bf16 cannot hold."""
    folder = tmp_path_factory.mktemp("source")
    make_model().save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    write_rows(folder, 11)
    return folder


@pytest.fixture(scope="module")
def export(source: Path, ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Gives the run folder of a case on an engine, run once."""
    done: dict[tuple[str, str], Path] = {}

    def run(engine: str, case: str) -> Path:
        if engine.startswith("zero"):
            pytest.importorskip("deepspeed")
        if (engine, case) not in done:
            out = tmp_path_factory.mktemp("run")
            size = 1 if engine == "single" else 2
            done[engine, case] = out
            ranks.run(size, run_jobs.train, recipe=recipe(source, engine, case), out=str(out), keep_masters=True)
        return done[engine, case]

    return run


def recipe(source: Path, engine: str, case: str) -> dict[str, Any]:
    content: dict[str, Any] = {
        "model": {"path": str(source / "model")},
        "data": {"path": str(source / "rows.jsonl"), "format": "text"},
        "precision": {"max_lost_update_share": None},
        "engine": {"name": engine, "ranks": 2},
        "train": {"steps": 4, "micro_batch": 2, "optimizer": {"lr": 1e-2}},
    }
    if engine == "zero3":
        content["engine"]["persistent_elements"] = 1
    for name, value in CASES[case].items():
        section, key = name.split(".")
        content[section][key] = value
    return Recipe.model_validate(content).model_dump(mode="json")


def load(folder: Path, dtype: Any = "auto") -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "export", dtype=dtype)


def weights_file(folder: Path, case: str) -> Path:
    return folder / "export" / ("adapter_model.safetensors" if case == "lora" else "model.safetensors")


@pytest.mark.parametrize("case", [name for name in CASES if name != "trained in fp32"])
@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "single"])
def test_the_same_bytes_from_every_engine(export: Export, engine: str, case: str) -> None:
    mine, reference = weights_file(export(engine, case), case), weights_file(export("single", case), case)
    assert mine.read_bytes() == reference.read_bytes()
    names = [sorted(path.name for path in folder.parent.iterdir()) for folder in (mine, reference)]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [("bf16", torch.bfloat16), ("bf16 to fp32", torch.float32), ("fp32 with frozen weights", torch.float32)],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_p64_the_dtype_asked_for_in_file_config_and_loaded_model(
    export: Export, engine: str, case: str, dtype: torch.dtype
) -> None:
    folder = export(engine, case)
    assert {tensor.dtype for tensor in load_file(weights_file(folder, case)).values()} == {dtype}
    config = json.loads((folder / "export" / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert {p.dtype for p in load(folder).parameters()} == {dtype}
    size = sum(p.numel() for p in make_model().parameters()) * dtype.itemsize
    assert size < weights_file(folder, case).stat().st_size < size + 8192


@pytest.mark.parametrize("engine", ENGINES)
def test_p74_every_shape_is_whole(export: Export, engine: str) -> None:
    shapes = {name: tuple(p.shape) for name, p in make_model().named_parameters()}
    with safe_open(weights_file(export(engine, "bf16"), "bf16"), framework="pt") as file:
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == shapes  # noqa: SIM118


@pytest.mark.parametrize("engine", ENGINES)
def test_p75_a_strict_reload_misses_nothing(export: Export, engine: str) -> None:
    folder = export(engine, "bf16")
    model, info = AutoModelForCausalLM.from_pretrained(folder / "export", dtype="auto", output_loading_info=True)
    assert {key: list(value) for key, value in info.items() if value} == {}
    tied = {"lm_head.weight": load_file(weights_file(folder, "bf16"))["model.embed_tokens.weight"]}
    fresh: Any = LlamaForCausalLM(model.config)
    fresh.load_state_dict(load_file(weights_file(folder, "bf16")) | tied, strict=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_tied_weights_are_stored_once_and_still_tied(export: Export, engine: str) -> None:
    folder = export(engine, "bf16")
    assert "lm_head.weight" not in load_file(weights_file(folder, "bf16"))
    model = load(folder)
    assert model.config.tie_word_embeddings is True
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("engine", ENGINES)
def test_frozen_weights_leave_as_they_came(export: Export, engine: str) -> None:
    """zero engines hold them in bf16 during the run."""
    case = "fp32 with frozen weights"
    before = dict(make_model().named_parameters())
    after = load_file(weights_file(export(engine, case), case))
    frozen = [name for name in before if name.startswith(("model.layers.0.", "model.norm."))]
    assert len(frozen) == 10
    for name, values in before.items():
        assert torch.equal(after[name], values) is (name in frozen), name
    rounded = before["model.layers.0.mlp.up_proj.weight"].bfloat16().float()
    assert not torch.equal(rounded, before["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", ["bf16", "bf16 to fp32"])
def test_the_weights_are_the_masters_in_the_dtype_asked_for(export: Export, engine: str, case: str) -> None:
    folder = export(engine, case)
    masters, exported = load_file(folder / "masters.safetensors"), load_file(weights_file(folder, case))
    assert masters.keys() == exported.keys()
    for name, master in masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(exported[name], master.to(exported[name].dtype)), name


@pytest.mark.parametrize(
    ("engine", "case"), [("fsdp", "trained in fp32"), ("zero1", "trained in fp32"), ("zero3", "stochastic")]
)
def test_the_exported_loss_is_that_of_the_exported_model(
    export: Export, source: Path, ranks: RankPools, tmp_path: Path, engine: str, case: str
) -> None:
    """Against a second run that starts from the export and evaluates it before its first step."""
    first = json.loads((export(engine, case) / "summary.json").read_text())
    content = recipe(source, "single", case)
    content["model"] |= {"path": str(export(engine, case) / "export"), "load_dtype": "stored"}
    ranks.run(1, run_jobs.train, recipe=content, out=str(tmp_path))
    second = json.loads((tmp_path / "summary.json").read_text())
    assert first["export"]["exported_loss"] == second["evaluations"][0]["loss"]
    assert first["export"]["trained_loss"] == first["evaluations"][-1]["loss"]
    if case == "trained in fp32":
        assert first["export"]["exported_loss"] != first["export"]["trained_loss"]


@pytest.mark.parametrize("engine", ["fsdp", "zero1"])
def test_the_dropped_share_counts_weights_that_were_exported_as_loaded(
    export: Export, source: Path, engine: str
) -> None:
    folder = export(engine, "trained in fp32")
    masters, exported = load_file(folder / "masters.safetensors"), load_file(weights_file(folder, "bf16"))
    loaded = {name: p.detach().bfloat16() for name, p in make_model().named_parameters()}
    moved = sum(int((masters[name] != loaded[name].float()).sum()) for name in masters)
    dropped = sum(int(((masters[n] != loaded[n].float()) & (exported[n] == loaded[n])).sum()) for n in masters)
    assert 0 < dropped < moved
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["export"]["dropped_share"] == dropped / moved


@pytest.mark.parametrize("engine", ENGINES)
def test_p43_the_rate_of_a_real_run_is_that_of_its_step_whatever_the_ranks(export: Export, engine: str) -> None:
    """Linear decay over 4 steps, by hand, in what the run wrote."""
    lines = (export(engine, "bf16") / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["lr"] for line in lines] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])


def test_the_tokenizer_comes_along(export: Export) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(export("fsdp", "bf16") / "export")
    assert tokenizer("a b m").input_ids == [3, 4, 15]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_adapters_load_onto_their_base(export: Export, engine: str) -> None:
    """Their logits are those of the base with W + alpha / rank * B @ A in place of W."""
    pytest.importorskip("peft")
    folder = export(engine, "lora")
    masters = load_file(folder / "masters.safetensors")
    expected: Any = make_model()
    changed = 0
    with torch.no_grad():
        for name, weight in expected.named_parameters():
            prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            if f"{prefix}A.default.weight" in masters:
                weight += 6.0 / 2 * masters[f"{prefix}B.default.weight"] @ masters[f"{prefix}A.default.weight"]
                changed += 1
    assert changed == 6
    untouched: Any = make_model()
    ids = torch.tensor([[3, 9, 4, 15, 1]])
    with torch.no_grad():
        loaded = load(folder)(ids).logits
        base = untouched(ids).logits
        torch.testing.assert_close(loaded, expected(ids).logits, rtol=1e-5, atol=1e-5)
    assert (loaded - base).abs().max() > 1e-3
