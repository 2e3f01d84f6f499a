"""Models and tokenizers: loading, freezing, adapters, shard units, and the forward pass to a loss."""

from __future__ import annotations

import functools
import inspect
import logging
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from samestep import weight_files
from samestep.dtypes import DTYPES
from samestep.errors import EngineError, ModelError
from samestep.recipe.schema import Lora
from samestep.recipe.schema import Model as ModelRecipe
from samestep.recipe.suggest import nearest

transformers_logging.disable_progress_bar()

# What the models of transformers call their tables of learned positions.
_POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a causal model is called with. Shapes [rows, length]; `mask` is None without packing."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None
    document_ids: torch.Tensor | None


def load_tokenizer(recipe: ModelRecipe) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer. Raises ModelError."""
    source = recipe.tokenizer or recipe.path
    if source is None:
        raise ModelError(
            "a fresh model needs a tokenizer", where="model.tokenizer", remedy="Name a folder or hub id that has one."
        )
    field = "model.tokenizer" if recipe.tokenizer else "model.path"
    return _from_source(lambda: AutoTokenizer.from_pretrained(source), source, "tokenizer", field)


def load_model(recipe: ModelRecipe, *, seed: int) -> PreTrainedModel | nn.Module:
    """The recipe's model on the CPU, in its load dtype, with adapters and frozen parameters as asked for.

    The same recipe and seed give the same bits in every process. Raises ModelError.
    """
    dtype = "auto" if recipe.load_dtype == "stored" else DTYPES[recipe.load_dtype]
    torch.manual_seed(seed)
    if recipe.path is not None:
        model = _stored_model(recipe, recipe.path, dtype)
    else:
        model = _fresh_model(recipe)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.float32 if dtype == "auto" else dtype)
    return _prepared(model, recipe, seed=seed)


def load_meta_model(recipe: ModelRecipe, *, attention: str = "eager") -> PreTrainedModel | nn.Module:
    """The model that `load_model` would load, on the meta device: names, shapes, dtypes and no weights.

    Where a run is only planned, the package of the recipe's own `attention` need not be there. Reads the config, and
    from a folder whose config names no dtype the headers of its weights. Raises ModelError.
    """
    if recipe.path is None:
        dtype = torch.float32
        config = _config(recipe)
    else:
        path = recipe.path
        config = _from_source(lambda: AutoConfig.from_pretrained(path), path, "model", "model.path")
        dtype = config.dtype or weight_files.first_dtype(Path(path)) or torch.float32
    if recipe.load_dtype != "stored":
        dtype = DTYPES[recipe.load_dtype]
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    except Exception as error:  # a config's values reach every corner of the library
        raise _no_model(error, "model.config" if recipe.path is None else "model.path") from error
    _take_stored_dtypes(model, recipe)
    return _prepared(model, recipe, seed=0)


def _prepared(model: PreTrainedModel, recipe: ModelRecipe, *, seed: int) -> PreTrainedModel | nn.Module:
    """The model with adapters and frozen parameters as the recipe asks for."""
    model.config.use_cache = False
    model.train()
    prepared = model if recipe.lora is None else _with_adapters(model, recipe.lora, seed=seed)
    _freeze(prepared, recipe.freeze)
    return prepared


def _refuse_other_shapes(recipe: ModelRecipe, folder: Path) -> None:
    """Before anything is allocated: a config that says no sizes means the library's own, those of a large model."""
    if not folder.is_dir():
        return
    stored = weight_files.tensors(folder)
    for name, parameter in load_meta_model(recipe.model_copy(update={"lora": None, "freeze": []})).named_parameters():
        if name in stored and stored[name].shape != tuple(parameter.shape):
            raise ModelError(
                f"{name} has the shape {list(stored[name].shape)} in its files, {list(parameter.shape)} by its config",
                where="model.path",
                remedy="config.json and the weights must be of one model.",
            )


def _stored_model(recipe: ModelRecipe, path: str, dtype: torch.dtype | str) -> PreTrainedModel:
    _refuse_other_shapes(recipe, Path(path))
    model, info = _from_source(
        lambda: AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=recipe.attention,
            output_loading_info=True,
            # Weights in other formats are pickles, which can run code.
            use_safetensors=True,
        ),
        path,
        "model",
        "model.path",
    )
    if info["missing_keys"]:
        # transformers fills them with random numbers, and only warns.
        missing = sorted(info["missing_keys"])
        more = f" and {len(missing) - 1} more weights" if len(missing) > 1 else ""
        raise ModelError(
            f"the files of {path} have no {missing[0]}{more}",
            where="model.path",
            remedy="Copy or download them again, or give the folder of a whole causal language model.",
        )
    refuse_whole_numbers(model, Path(path))
    _take_stored_dtypes(model, recipe)
    model._samestep_unused = tuple(sorted(info["unexpected_keys"]))
    return model


def _take_stored_dtypes(model: nn.Module, recipe: ModelRecipe) -> None:
    """transformers gives all weights the dtype that the config names: fp32 norms of a bf16 model would be rounded."""
    folder = weight_files.folder_of(recipe.path) if recipe.path is not None else None
    if recipe.load_dtype != "stored" or folder is None:
        return
    stored = weight_files.tensors(folder)
    for name, parameter in model.named_parameters():
        found = stored.get(name)
        if found is None or not parameter.is_floating_point() or found.dtype == parameter.dtype:
            continue
        if found.shape == tuple(parameter.shape):
            values = parameter.data.to(found.dtype) if parameter.is_meta else weight_files.read(found).clone()
            parameter.data = values


def refuse_whole_numbers(model: nn.Module, folder: Path) -> None:
    """transformers reads the bytes of a quantised weight as if they were the weight, where its config does not say."""
    whole = weight_files.whole_numbers(folder)
    for name, parameter in model.named_parameters():
        if name in whole and parameter.is_floating_point():
            raise ModelError(
                f"{name} is stored as whole numbers, and its config does not say how they are quantised",
                where="model.path",
                remedy="Give the folder of the model before it was quantised.",
            )


def unused_weights(model: nn.Module) -> tuple[str, ...]:
    """Names of the weights in the model's files that it has no place for."""
    return next((m._samestep_unused for m in model.modules() if "_samestep_unused" in vars(m)), ())  # type: ignore[return-value]


def check_config(recipe: ModelRecipe) -> None:
    """Raises ModelError when the config of a stored model cannot be read."""
    if recipe.path is not None:
        path = recipe.path
        _from_source(lambda: AutoConfig.from_pretrained(path), path, "config", "model.path")


def as_stored(model: PreTrainedModel, recipe: ModelRecipe, dtype: torch.dtype) -> PretrainedConfig:
    """The model's config as it leaves a run: with the dtype of its weights, and the cache that training turned off."""
    own = AutoConfig.from_pretrained(recipe.path) if recipe.path is not None else _config(recipe)
    if hasattr(own, "use_cache"):
        model.config.use_cache = own.use_cache
    else:
        vars(model.config).pop("use_cache", None)
    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    return model.config


def _fresh_model(recipe: ModelRecipe) -> PreTrainedModel:
    config = _config(recipe)
    try:
        with torch.device("cpu"):
            return AutoModelForCausalLM.from_config(config, attn_implementation=recipe.attention, dtype=torch.float32)
    except Exception as error:  # a config's values reach every corner of the library
        raise _no_model(error, "model.config") from error


def _config(recipe: ModelRecipe) -> PretrainedConfig:
    """The config that the recipe spells out."""
    settings = dict(recipe.config or {})
    try:
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    except Exception as error:
        raise _no_model(error, "model.config") from error
    # transformers keeps settings that it does not know, and takes its default for what was meant. Some are other
    # programs' own, so only what looks like a misspelt name is refused.
    known = {*type(config)().to_dict(), *config.attribute_map, *inspect.signature(type(config)).parameters}
    for name in settings:
        if name not in known and (meant := nearest(name, known, cutoff=0.85)) and meant not in settings:
            raise ModelError(
                f"{config.model_type} has no setting `{name}` - did you mean {meant}?", where="model.config"
            )
    return config


def _no_model(error: Exception, field: str) -> ModelError:
    return ModelError(
        f"no model can be made of this config: {_first_line(error)}",
        where=field,
        remedy="Give `model_type` and that model's own settings.",
    )


def _from_source(load: Callable[[], Any], source: str, what: str, field: str) -> Any:
    folder = Path(source)
    if folder.is_absolute() and not folder.is_dir():
        raise ModelError(f"there is no folder {source}", where=field, remedy="Give the folder of a saved model.")
    level = logging.root.manager.disable
    try:
        logging.disable(logging.WARNING)
        return load()
    except ImportError as error:
        raise ModelError(
            f"the {what} of {source} needs a package that is not there: {_first_line(error)}",
            where=field,
            remedy="Install it; or, when it is for model.attention, use sdpa.",
        ) from error
    except Exception as error:  # a damaged file fails in any of several libraries, each with errors of its own
        local = folder.is_dir()
        raise ModelError(
            f"the {what} of {source} cannot be loaded: {_first_line(error)}"
            if local
            else f"{source} is no folder, nor a hub id whose {what} can be loaded: {_first_line(error)}",
            where=field,
            remedy="It must be a folder that save_pretrained wrote, with every file whole, or the id of a hub model.",
        ) from error
    finally:
        logging.disable(level)


def _first_line(error: BaseException) -> str:
    if "ignore_mismatched_sizes" in str(error):
        return "its files have weights of other shapes than its config says"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # A first line that ends so has the reason in those after it.
    said = " ".join(lines) if lines[0].rstrip(".").endswith(":") else lines[0]
    return textwrap.shorten(said, 300, placeholder=" ...")


def _with_adapters(model: PreTrainedModel, lora: Lora, *, seed: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ModelError(
            "adapters need the package peft", where="model.lora", remedy="Install samestep[lora]."
        ) from error
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about names that peft uses
            # Adapters keep the base's dtype here; the precision plan gives them their masters.
            return get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ModelError(_first_line(error), where="model.lora.target_modules") from error


def learned_positions(model: nn.Module) -> int | None:
    """Positions that the model has an embedding for; None where positions are computed (rotary and the like)."""
    tables = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _POSITION_TABLES:
            # OPT and its kin keep the first places of the table for padding.
            kept: Any = getattr(module, "offset", 0)
            tables.append(module.num_embeddings - kept)
    return min(tables, default=None)


def is_adapter(name: str) -> bool:
    """Whether a parameter of a model with adapters belongs to one, by its name."""
    return ".lora_" in name


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the adapters of a model."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if is_adapter(name)}


def _freeze(model: nn.Module, patterns: list[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ModelError(
                f"no parameter matches {pattern!r}",
                where="model.freeze",
                remedy=f"Names look like {', '.join(names[:3])}.",
            )
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("every parameter is frozen", where="model.freeze", remedy="Leave something to train.")


def config_of(model: nn.Module) -> PretrainedConfig:
    """The config of the language model, also inside adapters and models of several parts."""
    config = next(module.config for module in model.modules() if isinstance(module, PreTrainedModel))
    return config.get_text_config()


def unit_modules(model: nn.Module, class_names: list[str] | None) -> list[nn.Module]:
    """The modules that form one shard unit each: of the named classes, or of the model's own no-split classes.

    Raises ModelError for a class that the model does not have, EngineError for units that would cut tied weights apart.
    """
    wanted = class_names if class_names is not None else _no_split_classes(model)
    present = {type(module).__name__ for module in model.modules()}
    missing = [name for name in wanted if name not in present]
    if class_names is not None and missing:
        raise ModelError(
            f"the model has no module of class {missing[0]}",
            where="engine.unit_classes",
            remedy=f"Its classes are {', '.join(sorted(present))}.",
        )
    units = [module for module in model.modules() if type(module).__name__ in wanted]
    _refuse_split_ties(model, units)
    return units


def _no_split_classes(model: nn.Module) -> list[str]:
    classes: set[str] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            classes.update(module._no_split_modules or [])
    return sorted(classes)


def _refuse_split_ties(model: nn.Module, units: list[nn.Module]) -> None:
    names: dict[int, list[str]] = {}
    homes: dict[int, set[int]] = {}
    index_of = {id(m): i for i, unit in enumerate(units) for m in unit.modules()}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
            homes.setdefault(id(parameter), set()).add(index_of.get(id(module), -1))
    for key, units_of in homes.items():
        if len(units_of) > 1:
            raise EngineError(
                f"{' and '.join(names[key])} are one tied weight, but lie in different shard units",
                where="engine.unit_classes",
                remedy="Leave the classes of tied modules out, so that they stay in the root unit.",
            )


def checkpoint_activations(units: list[nn.Module]) -> None:
    """Makes each unit recompute its activations in the backward pass; dropout repeats its random choices."""
    for unit in units:
        unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)


def loss_sum(model: nn.Module, inputs: Inputs, *, attention: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy summed over the label tokens, an fp32 scalar, and the logits [rows, length, vocabulary].

    Right padding needs no mask: under a causal mask no real token sees it, and its labels do not count.
    """
    extra: dict[str, torch.Tensor] = {}
    if inputs.document_ids is not None and inputs.position_ids is not None:
        extra = {"position_ids": inputs.position_ids, "attention_mask": _document_mask(inputs.document_ids, attention)}
    logits = model(input_ids=inputs.input_ids, use_cache=False, **extra).logits
    flat = logits.float().view(-1, logits.shape[-1])
    return F.cross_entropy(flat, inputs.labels.view(-1), ignore_index=-100, reduction="sum"), logits


def _document_mask(document_ids: torch.Tensor, attention: str) -> torch.Tensor:
    """Causal attention within documents: [rows, 1, length, length], bool (sdpa) or additive fp32 (eager)."""
    length = document_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    allowed = (document_ids[:, :, None] == document_ids[:, None, :]) & causal
    allowed = allowed[:, None]
    if attention == "sdpa":
        return allowed
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(allowed.shape, dtype=torch.float32, device=allowed.device).masked_fill_(~allowed, lowest)
