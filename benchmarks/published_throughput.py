"""The cluster model against published results.

    python benchmarks/published_throughput.py

Prints the tables of docs/cluster.md, and the efficiencies that the calibrating rows ask for. Nothing is tuned per row:
a row says what its source says, and what the source leaves open is in `assumed`.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from samestep import models
from samestep.planning.cluster import calibration
from samestep.planning.cluster.costs import Costs
from samestep.planning.cluster.description import load
from samestep.planning.cluster.machine import machine_of
from samestep.planning.cluster.work import Work, work_of
from samestep.recipe import parse
from samestep.recipe.schema import Model

# What a model's name ends with where the source ran it under torch.compile.
COMPILED = " (compiled)"
LLAMA = "model_type: llama, tie_word_embeddings: false"
CONFIGS = {
    "Llama 2 7B": f"{LLAMA}, vocab_size: 32000, hidden_size: 4096, intermediate_size: 11008, num_hidden_layers: 32, "
    "num_attention_heads: 32, num_key_value_heads: 32",
    "Llama 2 13B": f"{LLAMA}, vocab_size: 32000, hidden_size: 5120, intermediate_size: 13824, num_hidden_layers: 40, "
    "num_attention_heads: 40, num_key_value_heads: 40",
    "Llama 2 34B": f"{LLAMA}, vocab_size: 32000, hidden_size: 8192, intermediate_size: 22016, num_hidden_layers: 48, "
    "num_attention_heads: 64, num_key_value_heads: 8",
    "Llama 2 70B": f"{LLAMA}, vocab_size: 32000, hidden_size: 8192, intermediate_size: 28672, num_hidden_layers: 80, "
    "num_attention_heads: 64, num_key_value_heads: 8",
    "Llama 3 8B": f"{LLAMA}, vocab_size: 128256, hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, "
    "num_attention_heads: 32, num_key_value_heads: 8",
    "MPT 7B": "model_type: mpt, vocab_size: 50368, d_model: 4096, n_layers: 32, n_heads: 32",
    "MPT 13B": "model_type: mpt, vocab_size: 50368, d_model: 5120, n_layers: 40, n_heads: 40",
    "MPT 30B": "model_type: mpt, vocab_size: 50368, d_model: 7168, n_layers: 48, n_heads: 56",
    "MPT 70B": "model_type: mpt, vocab_size: 50368, d_model: 8192, n_layers: 80, n_heads: 64",
    "GPT 175B": "model_type: gpt2, vocab_size: 50257, n_embd: 12288, n_layer: 96, n_head: 96, n_positions: 1024",
    "GPT 1T": "model_type: gpt2, vocab_size: 50257, n_embd: 25600, n_layer: 128, n_head: 160, n_positions: 1024",
    "GPT 2T": "model_type: gpt2, vocab_size: 50257, n_embd: 32768, n_layer: 160, n_head: 128, n_positions: 1024",
}
# The sources: title and address.
ACCELERATE = ("From DeepSpeed to FSDP and Back Again", "https://huggingface.co/blog/deepspeed-to-fsdp-and-back")
IBM = ("Maximizing training throughput using PyTorch FSDP", "https://pytorch.org/blog/maximizing-training/")
FMS = ("fms-fsdp, README", "https://github.com/foundation-model-stack/fms-fsdp")
TITAN = (
    "torchtitan, Llama 3.1 on H100, 2024-12",
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
)
FOUNDRY = (
    "llm-foundry, MPT training benchmarks",
    "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md",
)
AZURE = (
    "Azure empowers easy-to-use, high-performance, and hyperscale model training using DeepSpeed",
    "https://github.com/deepspeedai/DeepSpeed/blob/master/docs/_posts/2022-07-26-deepspeed-azure.md",
)
KEMPNER = (
    "KempnerForge, MFU scaling, 2026-04-05",
    "https://github.com/KempnerInstitute/KempnerForge/tree/main/benchmarks/mfu_scaling",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published result, in tokens per second and device. `recomputed` is the share of the blocks' forward pass that
    activation checkpointing repeats, `batch` rows, micro-batches and tokens per row."""

    source: tuple[str, str]
    model: str
    engine: str
    device: str
    nodes: int
    per_node: int = 8
    network: str | None = None
    batch: tuple[int, int, int]
    recomputed: float
    published: float
    reduce: str = "bfloat16"
    more: tuple[str, ...] = ()
    offload: bool = False
    calibrates: bool = False
    """Of each source and kind of device the first row, but of the two that this project began with."""
    assumed: str = ""


def _megatron(config: tuple[int, int], length: int, tflops: float) -> float:
    """Tokens per second of TFLOPs per second by the formula that DeepSpeed's page gives, which counts recomputation;
    `config` is layers and hidden size."""
    layers, hidden = config
    per_token = 96 * layers * hidden**2 * (1 + length / (6 * hidden) + 50257 / (16 * layers * hidden))
    return tflops * 1e12 / per_token


A100, A100_40, H100, H200 = "A100-80GB", "A100-40GB", "H100-SXM", "H200"
_ORIGIN = "NVLink; activations checkpointed (without, they do not fit); 4096 tokens a row, from the step time"
_IBM = "4096 tokens a row; the 7B rows are HSDP by node, as in the README of source 4"
_TITAN = "op-wise selective checkpointing repeats half of the forward pass; SXM peak at 500 W"
_AZURE = "host link 32 GB/s, host memory 410 GB/s; activation offload hidden"


def _foundry(model: str, device: str, nodes: int, batch: tuple[int, int, int], ac: bool, published: float) -> Row:
    single = nodes == 1
    return Row(
        source=FOUNDRY, model=f"MPT {model}", engine="fsdp", device=device, nodes=nodes,
        network=None if single else "1600Gb/s", batch=batch, recomputed=float(ac), published=published,
        reduce="float32" if device != A100_40 and model != "70B" else "bfloat16", calibrates=single and model == "7B",
    )  # fmt: skip


def _titan(nodes: int, published: float, compiled: bool) -> Row:
    return Row(
        source=TITAN, model=f"Llama 3 8B{COMPILED if compiled else ''}", engine="fsdp", device=H100,
        nodes=nodes, network="3200Gb/s",
        batch=(2, 1, 8192), recomputed=0.5, published=published, reduce="float32",
        more=("memory_bandwidth=2.4TB/s", "memory=96GB"), assumed=_TITAN, calibrates=nodes == 1 and not compiled,
    )  # fmt: skip


def _azure(model: str, config: tuple[int, int], nodes: int, rows: int, length: int, tflops: float) -> Row:
    return Row(
        source=AZURE, model=model, engine="zero3", device=A100, nodes=nodes, network="1600Gb/s",
        batch=(rows, 1, length), recomputed=1.0, published=_megatron(config, length, tflops), reduce="float16",
        offload=True, more=("host_link=32GB/s", "host_memory_bandwidth=410GB/s"), assumed=_AZURE,
        calibrates=model == "GPT 175B",
    )  # fmt: skip


def _ibm(model: str, device: str, nodes: int, network: str, ac: bool, published: float, hybrid: bool = False) -> Row:
    return Row(
        source=IBM, model=model, engine="hsdp" if hybrid else "fsdp", device=device, nodes=nodes, network=network,
        batch=(2, 1, 4096), recomputed=float(ac), published=published,
        assumed=_IBM if hybrid else "4096 tokens a row", calibrates=hybrid,
    )  # fmt: skip


ROWS = (
    _foundry("7B", A100, 1, (6, 2, 2048), False, 4641),
    _foundry("13B", A100, 1, (10, 3, 4096), True, 2060),
    _foundry("30B", A100, 1, (3, 21, 2048), True, 916),
    _foundry("7B", H100, 1, (6, 1, 2048), False, 10643),
    _foundry("13B", H100, 1, (10, 3, 4096), True, 4717),
    _foundry("30B", H100, 1, (3, 21, 2048), True, 2002),
    Row(source=ACCELERATE, model="Llama 2 7B", engine="fsdp", device=A100, nodes=1, per_node=4, batch=(8, 1, 4096),
        recomputed=1.0, published=3158.7, assumed=_ORIGIN),
    Row(source=ACCELERATE, model="Llama 2 7B", engine="zero3", device=A100, nodes=1, per_node=4, batch=(8, 1, 4096),
        recomputed=1.0, published=3094.5, assumed=_ORIGIN),
    _ibm("Llama 2 7B", A100, 16, "400Gb/s", False, 3700, hybrid=True),
    _ibm("Llama 2 34B", A100, 16, "400Gb/s", True, 700),
    _ibm("Llama 2 70B", A100, 16, "400Gb/s", True, 370),
    _ibm("Llama 2 7B", H100, 12, "800Gb/s", False, 7500, hybrid=True),
    _ibm("Llama 2 34B", H100, 12, "800Gb/s", True, 1550),
    _ibm("Llama 2 70B", H100, 12, "800Gb/s", True, 800),
    Row(source=FMS, model="Llama 2 13B", engine="hsdp", device=A100, nodes=16, network="400Gb/s", batch=(1, 1, 4096),
        recomputed=0.0, published=1700, calibrates=True,
        assumed="the network of source 3; HSDP by node; 4096 tokens a row"),
    _titan(1, 5762, compiled=False),
    _titan(1, 6667, compiled=True),
    _titan(16, 5605, compiled=False),
    _titan(16, 6514, compiled=True),
    _foundry("7B", A100_40, 16, (18, 1, 2048), True, 3623),
    _foundry("13B", A100_40, 16, (16, 1, 2048), True, 1972),
    _foundry("30B", A100_40, 16, (6, 1, 2048), True, 865),
    _foundry("70B", A100_40, 16, (4, 1, 2048), True, 376),
    _foundry("70B", A100_40, 8, (2, 1, 2048), True, 276),
    _foundry("70B", A100, 8, (8, 4, 2048), True, 410),
    _azure("GPT 175B", (96, 12288), 32, 32, 512, 204.49),
    _azure("GPT 1T", (128, 25600), 128, 8, 1024, 165.36),
    _azure("GPT 2T", (160, 32768), 128, 8, 1024, 157),
    Row(source=KEMPNER, model=f"Llama 3 8B{COMPILED}", engine="fsdp", device=H200, nodes=1, per_node=4,
        batch=(4, 2, 4096),
        recomputed=1.0, published=38983 / 4, more=(f"matmul_efficiency={calibration.MATMUL_EFFICIENCY[H100]}",),
        assumed="the H100's efficiency"),
)  # fmt: skip


_SOURCES = list(dict.fromkeys(row.source for row in ROWS))


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the model says of a row. `limited_by` is the resource that the step would gain most from being free of."""

    row: Row
    predicted: float
    limited_by: str
    hidden: float
    """Share of the serial step that overlapping hides."""

    @property
    def error(self) -> float:
        return self.predicted / self.row.published - 1


@functools.cache
def _model(name: str) -> nn.Module:
    return models.load_meta_model(Model(config=parse(_recipe_text(name)).model.config, tokenizer="none"))


def _recipe_text(model: str, engine: str = "fsdp", ranks: int = 1) -> str:
    config = CONFIGS[model.removesuffix(COMPILED)]
    return (
        f"{{model: {{config: {{{config}}}, tokenizer: none}}, data: {{path: none}}, "
        f"engine: {{name: {engine}, ranks: {ranks}}}, train: {{steps: 1}}}}"
    )


@functools.cache
def _work(row: Row) -> Work:
    rows, micro_batches, length = row.batch
    settings = [
        f"data.max_tokens={length}", f"train.micro_batch={rows}", f"train.accumulation={micro_batches}",
        "engine.reduce_order=backend", f"precision.overrides.reduce={row.reduce}",
        *(["precision.low_dtype=float16"] if row.reduce == "float16" else []),
        *(["engine.offload={optimizer: cpu}"] if row.offload else []),
        *([f"engine.shard_ranks={row.per_node}"] if row.engine == "hsdp" else []),
    ]  # fmt: skip
    recipe = parse(_recipe_text(row.model, row.engine, row.nodes * row.per_node), overrides=settings)
    return work_of(recipe, _model(row.model), recomputed=row.recomputed)


def predicted(row: Row, *, matmul_efficiency: float | None = None) -> Result:
    """The model's tokens per second and device for a row."""
    given = [f"device={row.device}", f"nodes={row.nodes}", f"devices_per_node={row.per_node}", *row.more]
    given += [] if row.network is None or row.nodes == 1 else [f"inter_node={row.network}"]
    given += [] if matmul_efficiency is None else [f"matmul_efficiency={matmul_efficiency}"]
    work = _work(row)
    machine = machine_of(load(given), work)
    costs = Costs(work, machine)
    step, without = costs.step(), costs.if_free()
    return Result(
        row=row,
        predicted=work.tokens * work.micro_batches / step.overlapped,
        limited_by=min(without, key=lambda r: without[r]),
        hidden=1 - step.overlapped / step.serial,
    )


def results() -> list[Result]:
    return [predicted(row) for row in ROWS]


def asked_for(kind: str) -> float:
    """The efficiency at which the mean error of a kind of device's calibrating rows is zero."""
    rows = [row for row in ROWS if row.calibrates and row.device.startswith(kind)]
    low, high = 0.1, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        mean = statistics.fmean(predicted(row, matmul_efficiency=middle).error for row in rows)
        low, high = (middle, high) if mean < 0 else (low, middle)
    return low


_HEADINGS = (
    "source", "model", "engine", "devices", "batch", "recomputed", "published", "predicted", "error", "use",
)  # fmt: skip


def table(found: list[Result]) -> Iterator[str]:
    """The Markdown table of docs/cluster.md; a batch is rows x tokens (x micro-batches) of one device."""
    yield f"| {' | '.join(_HEADINGS)} |"
    yield "|" + "---|" * len(_HEADINGS)
    for result in found:
        row = result.row
        rows, micro, length = row.batch
        device = "A100 40GB" if row.device == A100_40 else row.device.split("-")[0]
        cells = (
            str(_SOURCES.index(row.source) + 1),
            row.model,
            row.engine,
            f"{row.nodes} x {row.per_node} {device}",
            f"{rows} x {length}" + (f" x {micro}" if micro > 1 else ""),
            f"{row.recomputed:.0%}",
            _tokens(row.published),
            _tokens(result.predicted),
            f"{result.error:+.1%}",
            "calibration" if row.calibrates else "held out",
        )
        yield f"| {' | '.join(cells)} |"


def sources() -> Iterator[str]:
    """The numbered list of docs/cluster.md: title, address, and what the rows assume beyond it."""
    for number, (title, address) in enumerate(_SOURCES, start=1):
        rows = [row for row in ROWS if row.source == (title, address)]
        networks = [row.network for row in rows if row.network is not None]
        texts = [f"network {' and '.join(dict.fromkeys(networks))} per node"] if networks else []
        texts += dict.fromkeys(part for row in rows for part in row.assumed.split("; ") if part)
        yield f"{number}. [{title}]({address}): {'; '.join(texts)}."


def _tokens(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def summary(found: list[Result]) -> str:
    """The mean absolute errors, in a sentence."""
    parts = []
    for name, chosen in (("calibrating", True), ("held-out", False)):
        errors = [abs(r.error) for r in found if r.row.calibrates == chosen]
        parts.append(f"{statistics.fmean(errors):.1%} over {len(errors)} {name} rows (at most {max(errors):.1%})")
    return "Mean absolute error: " + "; ".join(parts) + "."


def reached(found: list[Result]) -> tuple[float, float]:
    """The least and the greatest share of the prediction that a held-out published result reached."""
    shares = [r.row.published / r.predicted for r in found if not r.row.calibrates]
    return min(shares), max(shares)


def main() -> None:
    found = results()
    print("\n".join([*sources(), "", *table(found), ""]))
    print(summary(found))
    print("Held-out results reached {:.2f} to {:.2f} of the prediction.".format(*reached(found)))
    for kind in ("A100", "H100"):
        print(f"{kind}: the calibrating rows ask for {asked_for(kind):.3f}")


if __name__ == "__main__":
    main()
