"""The closed forms against matrix products counted by torch, and against the figures of the origin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from samestep.bench import flops
from samestep.bench.devices import DEVICES, find_device, peak_flops
from samestep.bench.flops import Attention, Decoder
from samestep.errors import ModelError

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROWS, LENGTH = 2, 16


def model_of(kind: str = "llama", **changes: Any) -> nn.Module:
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.config.use_cache = False
    return model.train()


def counted(model: Any, *, backward: bool) -> int:
    """FLOPs of all matrix products that torch executes. Eager attention computes every score, masked or not."""
    tokens = torch.randint(0, 97, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=tokens).logits
        if backward:
            logits.float().logsumexp(-1).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("key_value_heads", [4, 2, 1], ids=["all", "grouped", "one"])
def test_closed_form_is_what_torch_executes(tied: bool, key_value_heads: int) -> None:
    """P121: torchtitan's estimate had one of attention's two products (torchtitan#4366)."""
    model = model_of(tie_word_embeddings=tied, num_key_value_heads=key_value_heads)
    decoder = Decoder.llama(
        layers=3, hidden=24, intermediate=40, heads=4, key_value_heads=key_value_heads, vocabulary=97, tied=tied
    )
    assert Decoder.of(model) == decoder
    assert decoder.parameters == sum(p.numel() for p in model.parameters())
    lengths = [LENGTH] * ROWS
    assert flops.forward_flops(decoder, lengths, "full") == counted(model, backward=False)
    assert flops.model_flops(decoder, lengths, "full") == counted(model, backward=True)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gpt2", {"n_embd": 24, "n_head": 4, "n_layer": 3}),
        ("qwen3", {"head_dim": 12}),
        ("granite", {}),
        ("mistral", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_decoders_are_counted_right(kind: str, changes: dict[str, Any]) -> None:
    model = model_of(kind, **changes)
    assert flops.model_flops(Decoder.of(model), [LENGTH] * ROWS, "full") == counted(model, backward=True)


def test_recomputation_is_one_more_forward_pass_of_the_blocks() -> None:
    model: Any = model_of()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = flops.hardware_flops(Decoder.of(model), [LENGTH] * ROWS, "full", activation_checkpointing=True)
    with set_checkpoint_early_stop(False):
        assert expected == counted(model, backward=True)
    # What torch saves by stopping early is the last product of every block, as the docstring says.
    assert expected - counted(model, backward=True) == 3 * 2 * ROWS * LENGTH * 40 * 24


def test_adapters_leave_the_gradients_of_the_base_out() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model_of(tie_word_embeddings=False), settings)
    decoder = Decoder.of(model)
    base = Decoder.of(model_of(tie_word_embeddings=False))
    adapters = 3 * (2 * 24 + 2 * 24 + 2 * 24 + 2 * 12)  # A and B of q (24 to 24) and v (24 to 12)
    assert (decoder.weights, decoder.frozen_weights) == (base.weights + adapters, base.weights)
    # In the first layer nothing before the adapters is differentiated: the inputs of q, k, v and both A (q and v have
    # 2 columns there), and the keys, which no adapter reaches.
    below = 2 * ROWS * LENGTH * 24 * (24 + 12 + 12 + 2 + 2) + 2 * ROWS * LENGTH * LENGTH * 24
    assert flops.model_flops(decoder, [LENGTH] * ROWS, "full") == counted(model, backward=True) + below


def test_frozen_weights_save_their_own_gradients() -> None:
    model: Any = model_of(tie_word_embeddings=False)
    for layer in model.model.layers:
        layer.mlp.requires_grad_(False)
    assert Decoder.of(model).frozen_weights == 3 * 3 * 24 * 40
    assert flops.model_flops(Decoder.of(model), [LENGTH] * ROWS, "full") == counted(model, backward=True)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
def test_causal_attention_counts_the_pairs_of_the_mask(window: int | None) -> None:
    """P121: sliding windows were counted as if every query saw a whole one, or all keys."""
    pairs = sum(1 for query in range(LENGTH) for key in range(query + 1) if window is None or query - key < window)
    assert Attention(width=8, window=window).keys(LENGTH, "causal") * LENGTH == pytest.approx(pairs)


def test_rows_of_several_lengths_add_up() -> None:
    decoder = Decoder.of(model_of())
    both = flops.model_flops(decoder, [5, 16], "causal")
    assert both == flops.model_flops(decoder, [5], "causal") + flops.model_flops(decoder, [16], "causal")
    assert both < flops.model_flops(decoder, [5, 16], "full")


def test_sliding_windows_are_of_the_layers_that_have_them() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = model_of("qwen3", head_dim=6, use_sliding_window=True, sliding_window=4, layer_types=kinds)
    assert [layer.window for layer in Decoder.of(model).attention] == [4, None, 4]


def test_causal_attention_of_long_rows_is_half() -> None:
    """P120: by full scores an MFU of 1.21 was reported at 16k tokens (torchtitan#341): half are never computed."""
    decoder = Decoder.llama(layers=32, hidden=4096, intermediate=14336, heads=32, key_value_heads=8, vocabulary=128256)
    assert decoder.parameters == 8_030_261_248  # Llama 3 8B
    per_token = {mask: flops.model_flops(decoder, [16384], mask) / 16384 for mask in ("causal", "full")}
    full, causal = (per_token[mask] - 6 * decoder.weights for mask in ("full", "causal"))
    assert full == 12 * 32 * 4096 * 16384
    assert causal / full == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize(("rate", "expected", "seconds"), [(3158.7, 0.41, 10.4), (3094.5, 0.40, 10.6)])
def test_the_published_rows_of_the_origin(rate: float, expected: float, seconds: float) -> None:
    decoder = Decoder.llama(layers=32, hidden=4096, intermediate=11008, heads=32, key_value_heads=32, vocabulary=32000)
    assert decoder.parameters == 6_738_415_616
    for name in ("NVIDIA A100-SXM4-80GB", "a100-80gb"):
        found = flops.mfu(flops.six_n(decoder), rate, peak_flops(name, "bfloat16"))
        assert found == pytest.approx(expected, abs=0.005)
    assert round(8 * 4096 / rate, 1) == seconds


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("mixtral", {"num_local_experts": 2}, "mixture of experts"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
    ],
)
def test_what_the_forms_do_not_fit_is_refused(kind: str, changes: dict[str, Any], named: str) -> None:
    with torch.device("meta"):
        model = model_of()
    if kind == "mixtral":
        model.config = AutoConfig.for_model("mixtral", **SIZES)  # pyrefly: ignore[bad-argument-type]
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(ModelError, match=named):
        Decoder.of(model)


def test_an_unknown_device_has_no_peak() -> None:
    assert find_device("NVIDIA A100-SXM4-80GB MIG 1g.10gb") is None
    assert find_device("cpu") is None
    assert peak_flops("NVIDIA H999", "bfloat16") is None
    assert peak_flops("A100-40GB", "float8") is None
    assert flops.mfu(1e9, 100.0, None) is None


def test_devices_are_told_apart() -> None:
    names = [name.casefold() for device in DEVICES for name in (device.name, *device.reported)]
    assert len(set(names)) == len(names)
    for device in DEVICES:
        assert device.source
        assert device.peak_flops["bfloat16"] > device.peak_flops["float32"]
        # Bytes and operations per second, not giga or tera of them.
        assert 1e13 < device.peak_flops["float32"] < 1e15
        assert 1e10 < device.link_bytes_per_second < device.memory_bytes_per_second < 1e13
    assert peak_flops("nvidia h200", "bfloat16") == 989.4e12
