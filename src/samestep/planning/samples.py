"""Samples of the weights that a run will start from, for the forecast."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers.utils import cached_file

from samestep import models, weight_files
from samestep.precision.forecast import Weights, samples_per_tensor, tensor_class
from samestep.recipe.schema import Model, Recipe

_BUILT = 50_000_000
"""Elements of the largest fresh model that is made in order to look at it."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples of trainable weights and where they come from, for people. Empty where nothing is known."""

    weights: tuple[Weights, ...]
    source: str


def sample(recipe: Recipe, model: nn.Module) -> Samples:
    """Samples of the recipe's weights, in the dtypes of `model` (which may be on the meta device).

    Of a stored model, what its safetensors hold; of a fresh one its initial values, or numbers like them when it is
    large. Nothing is downloaded.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if recipe.model.path is None:
        numel = sum(p.numel() for p in model.parameters())
        if numel <= _BUILT:
            built = dict(models.load_model(recipe.model, seed=recipe.train.seed).named_parameters())
            found = {name: built[name].detach().reshape(-1) for name in trainable}
            return _cut(trainable, found, "the initial values of the fresh model")
        return _cut(trainable, {}, "numbers like the initial values of the fresh model", assume=_spread(model))
    folder = _folder(recipe.model)
    if folder is None:
        return Samples(weights=(), source=f"the weights of {recipe.model.path} are not on this machine")
    # Adapters are fresh also where the model is stored.
    known = {name for name in trainable if "lora_" not in name}
    found = _stored(folder, sorted(known))
    source = "the stored weights" if known else "numbers like the initial values of fresh adapters"
    if known and len(known) < len(trainable):
        source += " and of numbers like the initial values of fresh adapters"
    samples = _cut(trainable, found, source, assume=_spread(model), never_assume=known)
    if not samples.weights:
        return Samples(weights=(), source=f"{folder} has no safetensors with the trainable weights")
    return samples


def _folder(recipe: Model) -> Path | None:
    """The folder of the stored weights; of a hub id, its place in the cache."""
    path = Path(str(recipe.path))
    if path.is_dir():
        return path
    for name in ("model.safetensors.index.json", "model.safetensors"):
        file = cached_file(
            str(recipe.path), name, local_files_only=True, _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False, _raise_exceptions_for_gated_repo=False,
        )  # fmt: skip
        if file is not None:
            return Path(file).parent
    return None


def _stored(folder: Path, names: list[str]) -> dict[str, torch.Tensor]:
    tensors = weight_files.tensors(folder)
    places = {name: key for name in names if (key := _key(name, tensors)) is not None}
    wanted = [tensors[key] for key in sorted(set(places.values()))]
    read = {t.name: values for t, values in weight_files.samples(wanted, limit=samples_per_tensor(len(names)))}
    return {name: read[key] for name, key in places.items()}


def _key(name: str, tensors: dict[str, weight_files.StoredTensor]) -> str | None:
    """The name of a parameter in the files: adapters wrap it, and some files leave out its first part."""
    bare = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    return next((key for key in (bare, bare.partition(".")[2]) if key in tensors), None)


def _spread(model: nn.Module) -> float:
    config = models.config_of(model)
    return float(getattr(config, "initializer_range", None) or 0.02)


def _cut(
    trainable: dict[str, nn.Parameter],
    found: dict[str, torch.Tensor],
    source: str,
    *,
    assume: float = 0.0,
    never_assume: Collection[str] = (),
) -> Samples:
    """Samples of what was found; of the rest, unless `never_assume` names it, numbers of the spread `assume`."""
    limit, weights, unknown = samples_per_tensor(len(trainable)), [], 0
    for name, parameter in trainable.items():
        values = found.get(name)
        if values is None:
            if name in never_assume:
                unknown += parameter.numel()
                continue
            values = _assumed(name, parameter, assume, limit)
        stride = max(1, -(-values.numel() // limit))
        cut = values[::stride].to(parameter.dtype)
        weights.append(Weights(name=name, numel=parameter.numel(), dimensions=parameter.dim(), values=cut))
    if unknown:
        source += f" (without {unknown:,} that are stored under other names)"
    return Samples(weights=tuple(weights), source=source)


def _assumed(name: str, parameter: nn.Parameter, spread: float, limit: int) -> torch.Tensor:
    """Numbers like the usual initial values of a parameter, the same every time."""
    numel = min(parameter.numel(), limit)
    kind = tensor_class(name, parameter.dim())
    if kind == "norm":
        return torch.ones(numel)
    if kind == "bias" or "lora_B" in name:
        return torch.zeros(numel)
    random = torch.Generator().manual_seed(0)
    if "lora_A" in name:
        return (torch.rand(numel, generator=random) * 2 - 1) * parameter.shape[-1] ** -0.5
    return torch.randn(numel, generator=random) * spread
