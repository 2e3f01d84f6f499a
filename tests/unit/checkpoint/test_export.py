"""Exports of checkpoints: the bytes that transformers and peft write of the same weights, one tensor at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from samestep import models
from samestep.checkpoint.store import newest
from samestep.checkpoint.weight_writer import Layout, WeightWriter
from samestep.errors import CheckpointError, ModelError, OutputError
from samestep.training.exporting import export_checkpoint
from samestep.training.rank import run
from samestep.training.request import Request
from tests.small_runs import make_folder, make_tokenizer
from tests.unit.checkpoint.trained import LORA, checkpoint, recipe_of, source

IDS = torch.tensor([[3, 9, 4, 15, 1]])
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def reference(path: Path, masters: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """The stored model with the masters in it, by transformers alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    parameters = dict(model.named_parameters())
    for name, values in masters.items():
        parameters[name].data = values.to(dtype)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def same_files(ours: Path, theirs: Path, names: tuple[str, ...] = ("*.safetensors", "*.json")) -> None:
    for pattern in names:
        mine, others = (
            {path.name: path.read_bytes() for path in folder.glob(pattern) if not path.name.startswith("tokenizer")}
            for folder in (ours, theirs)
        )
        assert mine == others
        assert mine


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["loaded", "float32", "bfloat16", "float16"])
def test_the_files_are_those_that_transformers_writes(tmp_path: Path, stored: str, dtype: str) -> None:
    path = source(tmp_path / "model", dtype=DTYPES[stored])
    recipe = recipe_of({"path": str(path), "freeze": ["model.layers.0.*"]})
    folder, masters = checkpoint(tmp_path / "run", recipe)
    assert len(masters) < 29
    export_checkpoint(folder, tmp_path / "out", dtype=dtype)
    expected = reference(path, masters, DTYPES[stored if dtype == "loaded" else dtype])
    expected.save_pretrained(tmp_path / "theirs")
    same_files(tmp_path / "out", tmp_path / "theirs")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(logits(loaded), logits(expected))


@pytest.mark.parametrize("max_bytes", [500, 3000, 14784, 14783])
def test_several_files_with_an_index(tmp_path: Path, max_bytes: int) -> None:
    """The model has 14,784 bytes, its largest tensors 912."""
    path = source(tmp_path / "model", tie_word_embeddings=False)
    folder, masters = checkpoint(tmp_path / "run", recipe_of({"path": str(path)}))
    export_checkpoint(folder, tmp_path / "out", max_bytes=max_bytes)
    found = {file.name: load_file(file) for file in (tmp_path / "out").glob("*.safetensors")}
    for tensors in found.values():
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= max_bytes
    expected = reference(path, masters, torch.float32)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(expected))
    if max_bytes == 14784:
        assert list(found) == ["model.safetensors"]
        return
    expected.save_pretrained(tmp_path / "theirs", max_shard_size=max_bytes)
    ours, theirs = (json.loads((tmp_path / n / "model.safetensors.index.json").read_text()) for n in ("out", "theirs"))
    assert ours["metadata"] == theirs["metadata"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert all(name in found[file] for name, file in ours["weight_map"].items())


def test_tokenizer_chat_template_and_cache_come_along(tmp_path: Path) -> None:
    path = source(tmp_path / "model")
    folder, _ = checkpoint(tmp_path / "run", recipe_of({"path": str(path)}))
    export_checkpoint(folder, tmp_path / "out")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a b"}], tokenize=False) == "a b"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["use_cache"] is True
    assert (tmp_path / "out" / "generation_config.json").is_file()


def adapted(path: Path, adapters: Path) -> Any:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, str(adapters), autocast_adapter_dtype=False)


def test_adapters_alone_load_in_peft(tmp_path: Path) -> None:
    path = source(tmp_path / "model")
    folder, masters = checkpoint(tmp_path / "run", recipe_of({"path": str(path), "lora": LORA}))
    export_checkpoint(folder, tmp_path / "out")
    model = adapted(path, tmp_path / "out")
    found = dict(model.named_parameters())
    assert len(masters) == 12
    assert all(torch.equal(found[name], values) for name, values in masters.items())
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(path)
    assert not torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(path)))
    assert sorted(p.name for p in (tmp_path / "out").glob("*.safetensors")) == ["adapter_model.safetensors"]


def test_p83_adapters_leave_in_the_dtype_asked_for(tmp_path: Path) -> None:
    path = source(tmp_path / "model", dtype=torch.bfloat16)
    folder, masters = checkpoint(tmp_path / "run", recipe_of({"path": str(path), "lora": LORA}))
    for dtype, wanted in [("loaded", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)]:
        export_checkpoint(folder, tmp_path / dtype, dtype=dtype)
        found = load_file(tmp_path / dtype / "adapter_model.safetensors")
        assert len(found) == len(masters)
        for name, values in masters.items():
            stored = found[name.replace(".default", "")]
            assert stored.dtype == wanted
            assert torch.equal(stored, values.to(wanted))


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_adapters_are_what_peft_merges(tmp_path: Path, stored: str, dtype: str) -> None:
    path = source(tmp_path / "model", dtype=DTYPES[stored])
    folder, _ = checkpoint(tmp_path / "run", recipe_of({"path": str(path), "lora": LORA}))
    export_checkpoint(folder, tmp_path / "adapters", dtype="float32")
    export_checkpoint(folder, tmp_path / "out", dtype=dtype, merge=True)
    expected = adapted(path, tmp_path / "adapters").merge_and_unload().to(DTYPES[dtype])
    expected.save_pretrained(tmp_path / "theirs")
    same_files(tmp_path / "out", tmp_path / "theirs", ("*.safetensors",))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(logits(loaded), logits(expected))


def test_the_recipe_can_ask_for_merged_adapters(tmp_path: Path) -> None:
    path = source(tmp_path / "model")
    recipe = recipe_of({"path": str(path), "lora": LORA | {"export_merged": True}})
    folder, _ = checkpoint(tmp_path / "run", recipe)
    export_checkpoint(folder, tmp_path / "merged")
    export_checkpoint(folder, tmp_path / "adapters", merge=False)
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("merged", [False, True])
def test_a_run_leaves_what_its_last_checkpoint_would(tmp_path: Path, merged: bool) -> None:
    """Adapters on a bf16 model. What the export drops is counted from the tensors themselves."""
    make_folder(tmp_path, dtype=torch.bfloat16)
    recipe = recipe_of(
        {"path": str(tmp_path / "model"), "lora": LORA | {"export_merged": merged}},
        data={"path": str(tmp_path / "rows.jsonl"), "format": "text"},
        engine={"name": "single", "ranks": 1},
        train={"steps": 3, "micro_batch": 2, "optimizer": {"lr": 1e-3}},
        precision={"max_lost_update_share": None},
        checkpoint={"every": 3},
    )
    out = tmp_path / "out"
    out.mkdir()
    run(Request(recipe=recipe, out=out, keep_masters=True))
    export_checkpoint(newest(out), tmp_path / "export")
    same_files(out / "export", tmp_path / "export", ("*.safetensors", "*.json"))
    masters = load_file(out / "masters.safetensors")
    loaded = dict(models.load_model(recipe.model, seed=0).named_parameters())
    moved = dropped = 0
    if merged:
        exported = load_file(out / "export" / "model.safetensors")
        for name, weight in exported.items():
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{prefix}.base_layer.weight" in loaded:
                before = loaded[f"{prefix}.base_layer.weight"]
                change = (masters[f"{prefix}.lora_B.default.weight"] @ masters[f"{prefix}.lora_A.default.weight"]) * 3
                moves = (before.float() + change) != before.float()
                moved += int(moves.sum())
                dropped += int((moves & (weight == before)).sum())
    else:
        exported = load_file(out / "export" / "adapter_model.safetensors")
        for name, master in masters.items():
            moves = master != loaded[name].float()
            moved += int(moves.sum())
            dropped += int((moves & (exported[name.replace(".default", "")] == loaded[name])).sum())
    assert 0 < dropped < moved
    summary = json.loads((out / "summary.json").read_text())
    assert summary["export"]["dropped_share"] == dropped / moved


def test_adapters_on_a_tied_weight_are_not_merged(tmp_path: Path) -> None:
    path = source(tmp_path / "model")
    recipe = recipe_of({"path": str(path), "lora": LORA | {"target_modules": ["lm_head", "q_proj"]}})
    folder, _ = checkpoint(tmp_path / "run", recipe)
    with pytest.raises(ModelError, match="are one tied weight"):
        export_checkpoint(folder, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


def test_nothing_to_merge(tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path / "run", recipe_of({"path": str(source(tmp_path / "model"))}))
    with pytest.raises(CheckpointError, match="has no adapters to merge"):
        export_checkpoint(folder, tmp_path / "out", merge=True)


def fresh(path: Path, **changes: Any) -> dict[str, Any]:
    config = json.loads((path / "config.json").read_text())
    return {"config": config, "tokenizer": str(path), **changes}


@pytest.mark.parametrize("changes", [{}, {"lora": LORA}, {"lora": LORA, "load_dtype": "bfloat16"}])
@pytest.mark.parametrize("dtype", ["loaded", "float32", "bfloat16"])
def test_a_model_that_is_loaded_whole_leaves_in_the_same_way(
    tmp_path: Path, changes: dict[str, Any], dtype: str
) -> None:
    """A fresh model has no files to read from. The same weights stored first give the same export."""
    path = source(tmp_path / "model")
    recipe = recipe_of(fresh(path, **changes))
    base: Any = models.load_model(recipe.model.model_copy(update={"lora": None}), seed=0)
    base.config.use_cache = True
    base.save_pretrained(tmp_path / "stored")
    make_tokenizer().save_pretrained(tmp_path / "stored")
    stored = recipe_of({"path": str(tmp_path / "stored"), **changes})
    merge = "lora" in changes
    for name, wanted in [("whole", recipe), ("streamed", stored)]:
        folder, _ = checkpoint(tmp_path / name, wanted)
        export_checkpoint(folder, tmp_path / f"{name} out", dtype=dtype, merge=merge)
    files = ("*.safetensors", "config.json", "generation_config.json")
    for pattern in files:
        (ours,), (theirs,) = ((tmp_path / f"{name} out").glob(pattern) for name in ("whole", "streamed"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_files_with_other_names_than_the_model_are_read_by_transformers(tmp_path: Path) -> None:
    """Old files lack the prefix of the language model."""
    path = source(tmp_path / "model", tie_word_embeddings=False)
    recipe = recipe_of({"path": str(path)})
    folder, masters = checkpoint(tmp_path / "run", recipe)
    expected = reference(path, masters, torch.float32)
    from safetensors.torch import save_file

    weights = load_file(path / "model.safetensors")
    save_file({n.removeprefix("model."): t for n, t in weights.items()}, path / "model.safetensors", {"format": "pt"})
    export_checkpoint(folder, tmp_path / "out")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(expected))


def test_a_place_that_is_taken(tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path / "run", recipe_of({"path": str(source(tmp_path / "model"))}))
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(OutputError, match="is there already"):
        export_checkpoint(folder, out)
    with pytest.raises(OutputError, match="is not a model's folder"):
        export_checkpoint(folder, out, overwrite=True)
    out.rmdir()
    export_checkpoint(folder, out)
    export_checkpoint(folder, out, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        export_checkpoint(folder, tmp_path / "file" / "out")


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    folder, _ = checkpoint(tmp_path / "run", recipe_of({"path": str(source(tmp_path / "model"))}))
    pwrite, calls = os.pwrite, []

    def full(*arguments: Any) -> int:
        calls.append(1)
        if len(calls) > 5:
            raise OSError(28, "No space left on device")
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputError, match="cannot be written: No space left on device"):
        export_checkpoint(folder, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "run"]


MEASURE = """
import resource, sys
from pathlib import Path
import torch
from samestep.checkpoint import tensors
from samestep.training.exporting import export_checkpoint
from samestep.training.rank import run
from samestep.training.request import Request

tensors._BATCH_BYTES = 1 << 22
source, small, out = map(Path, sys.argv[1:])
export_checkpoint(small, out / "small")  # whatever is loaded only once
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export_checkpoint(source, out / "large", dtype="float32")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA])
def test_the_model_is_never_in_memory(tmp_path: Path, lora: dict[str, Any] | None) -> None:
    """118 MB of weights in tensors of at most 3 MB: a process that exports them grows by far less."""
    small = source(tmp_path / "small")
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "head_dim": 64}
    large = source(tmp_path / "large", num_attention_heads=8, **sizes)
    folders = [
        checkpoint(tmp_path / f"run {path.name}", recipe_of({"path": str(path), "lora": lora}))[0]
        for path in (large, small)
    ]
    assert (large / "model.safetensors").stat().st_size > 110e6
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", MEASURE, *map(str, folders), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 40e6


def test_a_weight_that_does_not_come_is_named(tmp_path: Path) -> None:
    """Nothing is exported of which a part is missing."""
    with (
        pytest.raises(ValueError, match="b was announced and never written"),
        WeightWriter(tmp_path, {n: Layout(dtype=torch.float32, shape=(2,)) for n in "ab"}) as writer,
    ):
        writer.write("a", torch.zeros(2))
