"""Predictions against closed forms, at the limits of every resource."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.errors import EngineError, RecipeError
from samestep.planning.cluster.description import load
from samestep.planning.cluster.prediction import predict
from samestep.recipe import parse
from samestep.recipe.schema import Recipe

HIDDEN, INNER, LAYERS, VOCABULARY, LENGTH, ROWS = 256, 512, 4, 1024, 128, 4
BLOCK = 4 * HIDDEN**2 + 3 * HIDDEN * INNER
WEIGHTS = LAYERS * BLOCK + VOCABULARY * HIDDEN
ROOT = 2 * VOCABULARY * HIDDEN + HIDDEN
PARAMETERS = WEIGHTS + VOCABULARY * HIDDEN + (2 * LAYERS + 1) * HIDDEN
# No device of the table: every number is given here.
BASE: dict[str, Any] = {
    "device": "made-up",
    "devices_per_node": "8",
    "peak_flops": "1e12",
    "memory": "80GB",
    "memory_bandwidth": "1e17",
    "intra_node": "1e17",
    "inter_node": "1e17",
    "matmul_efficiency": "0.5",
    "intra_node_latency": "0.0",
    "inter_node_latency": "0.0",
    "link_efficiency": "1.0",
    "memory_efficiency": "1.0",
}


def recipe(engine: str = "fsdp", settings: str = "", train: str = "", ranks: int = 16) -> Recipe:
    return parse(
        f"{{model: {{config: {{model_type: llama, vocab_size: {VOCABULARY}, hidden_size: {HIDDEN}, "
        f"intermediate_size: {INNER}, num_hidden_layers: {LAYERS}, num_attention_heads: 8, num_key_value_heads: 8, "
        f"tie_word_embeddings: false}}, tokenizer: none}}, data: {{path: none, max_tokens: {LENGTH}}}, "
        f"engine: {{name: {engine}, ranks: {ranks}, reduce_order: backend{settings}}}, "
        f"train: {{steps: 100, micro_batch: {ROWS}{train}}}}}"
    )


def predicted(made: Recipe | None = None, *, nodes: int = 2, **changes: Any) -> dict[str, Any]:
    given = {**BASE, "nodes": nodes, **changes}
    return predict(made or recipe(), load([f"{name}={value}" for name, value in given.items() if value is not None]))


def computing(*, again: bool = False) -> float:
    """Seconds of matrix products at half of 1e12: 6 per weight and token, and attention under a causal mask."""
    attention = LAYERS * 12 * HIDDEN * (LENGTH + 1) / 2
    repeated = LAYERS * 2 * BLOCK + attention / 3 if again else 0
    return ROWS * LENGTH * (6 * WEIGHTS + attention + repeated) / 0.5e12


def test_infinitely_fast_links_and_memory_leave_computing() -> None:
    for engine in ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"):
        found = predicted(recipe(engine))
        assert found["step_seconds"] == pytest.approx(computing(), rel=1e-4)
        assert found["limited_by"] == "compute"
    found = predicted(recipe(train=", activation_checkpointing: true"))
    assert found["step_seconds"] == pytest.approx(computing(again=True), rel=1e-4)
    # By 6N what is computed again does not count, nor do scores; the hardware's share is the assumed one.
    tokens = ROWS * LENGTH / computing(again=True)
    assert found["mfu"]["6N"] == pytest.approx(tokens * 6 * PARAMETERS / 1e12, rel=1e-4)
    assert found["mfu"]["hardware"] == pytest.approx(0.5, rel=1e-4)


def test_infinitely_fast_computing_leaves_the_links() -> None:
    found = predicted(peak_flops="9e20", inter_node="1GB/s")
    # Half of everything comes from the other node: bf16 weights twice (the root's stay), fp32 gradients once.
    seconds = (PARAMETERS * (2 + 2 + 4) - ROOT * 2) / 2 / 1e9
    assert found["step_seconds"] == pytest.approx(found["step_seconds_without_overlap"], rel=1e-3)
    assert found["step_seconds"] == pytest.approx(seconds, rel=1e-3)
    assert found["seconds"]["reduce"] == pytest.approx(PARAMETERS * 4 / 2 / 1e9, rel=1e-3)
    assert found["limited_by"] in ("gather", "reduce")
    kept = predicted(recipe(settings=", reshard_after_forward: false"), peak_flops="9e20", inter_node="1GB/s")
    assert kept["step_seconds"] == pytest.approx(PARAMETERS * (2 + 4) / 2 / 1e9, rel=1e-3)


@pytest.mark.parametrize(
    ("engine", "settings", "bytes_per_parameter"),
    [
        ("ddp", "", 2 * 4),
        ("fsdp", "", 2 + 2 + 4),
        ("hsdp", ", shard_ranks: 8", 2 * 4),
        ("zero1", "", 2 * 4 + 2),
        ("zero2", "", 4 + 2),
        ("zero3", "", 2 + 2 + 4),
    ],
)
def test_what_crosses_the_network(engine: str, settings: str, bytes_per_parameter: int) -> None:
    # Two nodes: a node receives half of what is gathered or reduced. In hsdp every device reduces an eighth with its
    # twin, all eight at once.
    found = predicted(recipe(engine, settings), peak_flops="9e20", inter_node="1GB/s")
    kept = ROOT * 2 if engine in ("fsdp", "zero3") else 0
    assert found["step_seconds"] == pytest.approx((PARAMETERS * bytes_per_parameter - kept) / 2 / 1e9, rel=1e-3)


def test_the_tree_crosses_the_network_once_per_device() -> None:
    ring, tree = predicted(inter_node="1GB/s"), predicted(_with_tree(), inter_node="1GB/s")
    assert tree["seconds"]["reduce"] == pytest.approx(8 * ring["seconds"]["reduce"])
    assert any("all-to-all" in text for text in tree["assumptions"])
    assert not any("all-to-all" in text for text in ring["assumptions"])


def _with_tree() -> Recipe:
    made = recipe()
    return made.model_copy(update={"engine": made.engine.model_copy(update={"reduce_order": "tree"})})


def test_a_slow_memory() -> None:
    found = predicted(nodes=1, peak_flops="9e20", memory_bandwidth="1GB/s", inter_node=None)
    assert found["limited_by"] == "memory"
    slower = predicted(nodes=1, peak_flops="9e20", memory_bandwidth="0.5GB/s", inter_node=None)
    assert slower["step_seconds"] == pytest.approx(2 * found["step_seconds"], rel=1e-3)
    # The optimizer alone: of an eighth of the parameters, masters and moments are read and written, gradients read.
    assert found["step_seconds"] > PARAMETERS / 8 * (2 * 12 + 4) / 1e9


def test_more_nodes_never_make_a_step_shorter() -> None:
    links = {"intra_node": "100GB/s", "inter_node": "10GB/s", "inter_node_latency": 1e-5, "intra_node_latency": 1e-6}
    steps = [predicted(nodes=nodes, **links)["step_seconds"] for nodes in (1, 2, 4, 16, 128, 1024)]
    assert steps == sorted(steps) and steps[0] < steps[1] < steps[-1]


def test_overlap_hides_communication_and_never_computing() -> None:
    found = predicted(intra_node="100GB/s", inter_node="10GB/s")
    parts = found["seconds"]
    assert found["step_seconds_without_overlap"] == pytest.approx(sum(parts.values()))
    assert parts["compute"] < found["step_seconds"] < found["step_seconds_without_overlap"]
    assert all(seconds <= found["step_seconds"] for seconds in found["step_seconds_if_free"].values())


def test_accumulation_reduces_once_or_every_time() -> None:
    slow = {"peak_flops": "9e20", "inter_node": "1GB/s"}
    every = predicted(recipe(train=", accumulation: 4"), **slow)
    once = predicted(recipe(settings=", reduce_every: step", train=", accumulation: 4"), **slow)
    assert every["seconds"]["reduce"] == pytest.approx(4 * once["seconds"]["reduce"])
    assert every["seconds"]["gather"] == pytest.approx(once["seconds"]["gather"])
    assert every["tokens_per_step"] == 4 * ROWS * LENGTH * 16


def test_offload() -> None:
    hosts = {"host_link": "1GB/s", "host_memory_bandwidth": "8GB/s"}
    found = predicted(recipe(settings=", offload: cpu"), nodes=1, inter_node=None, peak_flops="9e20", **hosts)
    own = PARAMETERS / 8
    # fp32 masters go to the device before both gathers, fp32 gradients back; the host's memory is shared by eight.
    moved = own * (4 + 4 + 4) / 1e9 - ROOT / 8 * 4 / 1e9 + own * (2 * 12 + 4) / 1e9
    assert found["limited_by"] == "offload"
    assert found["step_seconds"] == pytest.approx(moved, rel=1e-3)
    with pytest.raises(EngineError, match="host_link"):
        predicted(recipe(settings=", offload: cpu"))
    with pytest.raises(EngineError, match="nvme"):
        nvme = ", offload: {parameters: nvme, nvme_path: /nowhere}"
        predicted(recipe("zero3", nvme), **hosts)


def test_costs() -> None:
    found = predicted(price_per_device_hour=3)
    seconds = found["step_seconds"]
    assert found["cost"]["per_step"] == pytest.approx(seconds / 3600 * 16 * 3)
    assert found["cost"]["run"] == pytest.approx(100 * seconds / 3600 * 16 * 3)
    assert found["cost"]["per_million_tokens"] == pytest.approx(
        1e6 * found["cost"]["per_step"] / found["tokens_per_step"]
    )
    free = predicted()["cost"]
    assert free["run"] is None and free["run_hours"] == pytest.approx(100 * seconds / 3600)


def test_what_does_not_fit_has_no_numbers() -> None:
    found = predicted(memory="1MB")
    assert found["memory"]["fits"] is False
    assert found["memory"]["bytes_per_rank"] > 10**6
    assert found["step_seconds"] is found["mfu"] is found["cost"] is found["limited_by"] is None


def test_groups_that_do_not_fill_nodes() -> None:
    with pytest.raises(EngineError, match="do not fill nodes of 8"):
        predicted(recipe("hsdp", ", shard_ranks: 6", ranks=24), nodes=3)
    with pytest.raises(EngineError, match="do not fill nodes of 8"):
        predicted(recipe("hsdp", ", shard_ranks: 12", ranks=24), nodes=3)
    with pytest.raises(RecipeError, match="shard_ranks"):
        predicted(recipe("hsdp", ", shard_ranks: 16"), nodes=3)
    with pytest.raises(EngineError, match="single is one process"):
        predicted(recipe("single"))


def of_table(**changes: Any) -> dict[str, Any]:
    """A prediction with what the table says of the device."""
    left_out = ("peak_flops", "memory", "memory_bandwidth", "intra_node", "matmul_efficiency")
    return predicted(**{**dict.fromkeys(left_out), **changes})  # pyrefly: ignore[bad-argument-type]


def test_devices() -> None:
    found = of_table(device="a100-80gb")
    assert found["memory"]["device_bytes"] == 80e9
    with pytest.raises(EngineError, match=r"not in the table.*did you mean h100-sxm"):
        of_table(device="H100-SXN")
    with pytest.raises(EngineError, match="matmul_efficiency"):
        of_table(device="B200")
    assert of_table(device="B200", matmul_efficiency=0.4)["step_seconds"] > 0
