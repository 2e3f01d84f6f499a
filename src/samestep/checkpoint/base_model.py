"""The model that a run was made from, without its weights in memory: its structure, and where each weight lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from samestep import models, weight_files
from samestep.recipe.schema import Model as ModelRecipe
from samestep.weight_files import StoredTensor

_WRAPPED = "base_model.model."
"""What peft puts in front of the names of the model that it wraps."""


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """A stored model. `skeleton` and, with adapters, `adapted` are on the meta device; `stored` has every parameter and
    persistent buffer of the skeleton, ties once, in the dtype `dtype` when it is read."""

    recipe: ModelRecipe
    skeleton: PreTrainedModel
    adapted: nn.Module | None
    stored: dict[str, StoredTensor]
    dtype: torch.dtype

    def read(self, name: str) -> torch.Tensor:
        """A weight as the run loaded it, by its name in the skeleton. Raises ModelError."""
        return weight_files.read(self.stored[name]).to(self.dtype)

    def generation_config(self) -> GenerationConfig | None:
        """How the model generates, or None when it does not."""
        if not self.skeleton.can_generate():
            return None
        assert self.recipe.path is not None
        try:
            return GenerationConfig.from_pretrained(self.recipe.path)
        except OSError:
            return self.skeleton.generation_config


def open_base(recipe: ModelRecipe) -> BaseModel | None:
    """The recipe's model, or None when only loading it whole says what its weights are: a fresh one, one whose files
    have other names, dtypes or contents than the model itself, or one with frozen adapters. Raises ModelError."""
    if recipe.path is None:
        return None
    plain = recipe.model_copy(update={"lora": None, "freeze": []})
    skeleton = models.load_meta_model(plain)
    folder = weight_files.folder_of(recipe.path)
    if folder is None or not isinstance(skeleton, PreTrainedModel) or _is_converted(skeleton):
        return None
    stored = weight_files.tensors(folder)
    wanted = state_of(skeleton)
    if any(name not in stored or stored[name].shape != tuple(tensor.shape) for name, tensor in wanted.items()):
        return None
    dtypes = {tensor.dtype for tensor in wanted.values()}
    if recipe.load_dtype == "stored":
        dtypes |= {stored[name].dtype for name in wanted}
    if len(dtypes) != 1:
        return None
    adapted = models.load_meta_model(recipe) if recipe.lora else None
    if adapted and not all(p.requires_grad for name, p in adapted.named_parameters() if models.is_adapter(name)):
        return None
    return BaseModel(
        recipe=recipe,
        skeleton=skeleton,
        adapted=adapted,
        stored={name: stored[name] for name in wanted},
        dtype=dtypes.pop(),
    )


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a model's files hold: parameters and persistent buffers by name; of tied ones the first name."""
    own = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    return {name: tensor for name, tensor in model.state_dict().items() if name in own}


def unwrapped(name: str) -> str:
    """The name in the model itself of a parameter of an adapted model that belongs to no adapter."""
    return name.removeprefix(_WRAPPED).replace(".base_layer.", ".")


def _is_converted(model: PreTrainedModel) -> bool:
    """Whether transformers makes the model's weights of others, or keeps some in another dtype."""
    kept = [m for m in model.modules() if getattr(m, "_keep_in_fp32_modules", None)]
    kept += [m for m in model.modules() if getattr(m, "_keep_in_fp32_modules_strict", None)]
    quantised = getattr(model.config, "quantization_config", None) is not None
    return bool(kept) or quantised or bool(get_model_conversion_mapping(model, add_legacy=False))
