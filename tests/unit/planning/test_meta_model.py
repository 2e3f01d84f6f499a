"""A model on the meta device has the names, shapes, dtypes and trainable parameters of the loaded one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from samestep import models
from samestep.errors import ModelError
from samestep.recipe.schema import Lora, Model
from tests.small_runs import make_model

FRESH: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def seen(model: nn.Module) -> list[Any]:
    parameters = [(name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()]
    return [*parameters, *((name, b.shape, b.dtype) for name, b in model.named_buffers())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"load_dtype": "float32"},
        {"freeze": ["model.embed_tokens.*"]},
        {"lora": Lora(rank=2)},
    ],
    ids=["stored", "float32", "frozen", "lora"],
)
def test_of_a_stored_model(folder: Path, settings: dict[str, Any]) -> None:
    if "lora" in settings:
        pytest.importorskip("peft")
    recipe = Model(path=str(folder), **settings)
    meta = models.load_meta_model(recipe)
    assert {p.device.type for p in meta.parameters()} == {"meta"}
    assert seen(meta) == seen(models.load_model(recipe, seed=0))


@pytest.mark.parametrize("settings", [{}, {"load_dtype": "bfloat16"}, {"attention": "flash_attention_2"}])
def test_of_a_fresh_model(settings: dict[str, Any]) -> None:
    meta = models.load_meta_model(Model(config=FRESH, tokenizer="none", **settings))
    loadable: dict[str, Any] = settings | {"attention": "sdpa"}
    real = Model(config=FRESH, tokenizer="none", **loadable)
    assert seen(meta) == seen(models.load_model(real, seed=0))


def test_dtype_of_the_files_where_the_config_names_none(folder: Path) -> None:
    config = folder / "config.json"
    text = config.read_text()
    assert '"dtype": "bfloat16",' in text
    try:
        config.write_text(text.replace('"dtype": "bfloat16",', ""))
        assert {p.dtype for p in models.load_meta_model(Model(path=str(folder))).parameters()} == {torch.bfloat16}
    finally:
        config.write_text(text)


def test_stored_means_the_dtype_of_every_tensor_in_its_file(tmp_path: Path) -> None:
    """P18: fp32 norms in a bf16 base, rounded to bf16 by transformers; and bf16 weights whose config says float32."""
    model = make_model(dtype=torch.bfloat16)
    norms = {name: p for name, p in model.named_parameters() if "norm" in name}
    for number, parameter in enumerate(norms.values()):
        parameter.data = parameter.data.float() + 2**-12 * (number + 1)  # no bf16 numbers
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    for named in ("bfloat16", "float32"):
        config.write_text(config.read_text().replace('"dtype": "bfloat16"', f'"dtype": "{named}"'))
        loaded = models.load_model(Model(path=str(tmp_path)), seed=0)
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter, model.get_parameter(name)), name
            assert parameter.dtype == (torch.float32 if name in norms else torch.bfloat16)
        assert seen(models.load_meta_model(Model(path=str(tmp_path)))) == seen(loaded)
    wide = models.load_model(Model(path=str(tmp_path), load_dtype="bfloat16"), seed=0)
    assert {p.dtype for p in wide.parameters()} == {torch.bfloat16}


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded"):
        models.load_meta_model(Model(path=str(tmp_path)))
    with pytest.raises(ModelError, match="no model can be made"):
        models.load_meta_model(Model(config={**FRESH, "hidden_size": "wide"}, tokenizer="none"))
    with pytest.raises(ModelError, match="no model can be made"):
        models.load_meta_model(Model(config={"model_type": "lama"}, tokenizer="none"))
