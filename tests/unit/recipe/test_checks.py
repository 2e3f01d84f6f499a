"""Faults that only show in several fields together."""

from __future__ import annotations

import pytest

from samestep.errors import RecipeError
from samestep.recipe import parse
from samestep.recipe.checks import CHECKS
from samestep.recipe.fields import field_paths

GOOD = """\
model: {path: m}
data: {path: d}
train: {steps: 10}
"""
TEMPLATE = "data.template='Q: {question} A: {answer}'"

BAD = [
    (["model.path=null"], "model", "needs a path"),
    (["model.config={model_type: llama}", "model.tokenizer=t"], "model.config", "both given"),
    (["model.path=null", "model.config={a: 1}", "model.tokenizer=t"], "model.config", "needs a model_type"),
    (["model.path=null", "model.config={model_type: llama}"], "model.tokenizer", "is missing"),
    (["model.path=''"], "model.path", "empty text"),
    (["data.path='  '"], "data.path", "empty text"),
    (["data.path={hub: ''}"], "data.path.hub", "empty text"),
    (["data.held_out=''"], "data.held_out", "empty text"),
    (["train.steps=null"], "train.steps", "give train.steps or train.epochs"),
    (["train.epochs=1.5"], "train.epochs", "both given"),
    (["train.schedule.warmup_steps=11"], "train.schedule.warmup_steps", "do not fit"),
    (["train.schedule={name: constant, final_factor: 0.1}"], "train.schedule.final_factor", "only linear and cosine"),
    (["train.optimizer.momentum=0.9"], "train.optimizer.momentum", "only sgd"),
    (["train.optimizer={name: sgd, betas: [0.9, 0.95]}"], "train.optimizer.betas", "only adamw"),
    (["train.evaluate_every=5"], "train.evaluate_every", "no held-out rows"),
    (["data.held_out=4", "data.rows=4"], "data.held_out", "leave nothing to train on"),
    (["data.max_tokens=1"], "data.max_tokens", "at least 2"),
    (["data.max_tokens=1", "data.packing=true"], "data.max_tokens", "a packed row of one token"),
    (["data.columns={prompt: q}"], "data.columns.prompt", "format alpaca has no column 'prompt'"),
    (["data.columns={inputs: q}"], "data.columns.inputs", "did you mean input?"),
    ([TEMPLATE, "data.loss_on=all", "data.columns={q: b}"], "data.columns.q", "the template has no column 'q'"),
    (["data.response_marker='A:'"], "data.response_marker", "needs data.template"),
    ([TEMPLATE], "data.response_marker", "is missing"),
    ([TEMPLATE, "data.response_marker='B:'"], "data.response_marker", "does not occur"),
    ([TEMPLATE, "data.response_marker=''"], "data.response_marker", "empty text"),
    # The marker is text of the template, never the name of a column in it.
    ([TEMPLATE, "data.response_marker='{answer}'"], "data.response_marker", "does not occur"),
    ([TEMPLATE, "data.response_marker='A:'", "data.format=messages"], "data.template", "format: messages"),
    (["data.template='{a} {'", "data.loss_on=all"], "data.template", "write {{ or }}"),
    (["data.template='a } b'", "data.loss_on=all"], "data.template", "write {{ or }}"),
    (["data.template='{}'", "data.loss_on=all"], "data.template", "is not a column"),
    (["data.template='{a.b}'", "data.loss_on=all"], "data.template", "is not a column"),
    (["data.template='{a[0]}'", "data.loss_on=all"], "data.template", "is not a column"),
    (["data.template='{a!r}'", "data.loss_on=all"], "data.template", "is not a column"),
    (["data.template='{a:5}'", "data.loss_on=all"], "data.template", "is not a column"),
    (["data.template='plain {{a}}'", "data.loss_on=all"], "data.template", "names no column"),
    (["precision={regime: low, low_dtype: float16}"], "precision.low_dtype", "regime: mixed"),
    (["precision={regime: mixed-fp8, low_dtype: float16}"], "precision.low_dtype", "use bfloat16"),
    (["precision.loss_scale={initial: 2, minimum: 4}"], "precision.loss_scale.minimum", "above the initial"),
    (["engine={name: hsdp, ranks: 1}"], "engine.ranks", "at least 2 ranks"),
    (["engine={name: hsdp, ranks: 6, shard_ranks: 4}"], "engine.shard_ranks", "1, 2, 3, 6"),
    (["engine={name: hsdp, ranks: 5}"], "engine.shard_ranks", "half of the ranks, 2, does not divide 5"),
    (["engine={name: fsdp, ranks: 4, shard_ranks: 2}"], "engine.shard_ranks", "only hsdp"),
    (["engine={name: ddp, reshard_after_forward: false}"], "engine.reshard_after_forward", "only fsdp and hsdp"),
    (["engine={name: zero3, forward_prefetch: 1}"], "engine.forward_prefetch", "only fsdp and hsdp"),
    (["engine={name: single, backward_prefetch: 1}"], "engine.backward_prefetch", "only fsdp and hsdp"),
    (["engine={name: zero2, ignored_modules: [a]}"], "engine.ignored_modules", "only single, ddp, fsdp and hsdp"),
    (["engine={name: fsdp, bucket_elements: 5}"], "engine.bucket_elements", "only zero1, zero2 and zero3"),
    (["engine={name: zero2, live_elements: 5}"], "engine.live_elements", "only zero3"),
    (["engine={name: single, offload: cpu}"], "engine.offload", "single cannot offload"),
    (["engine={name: fsdp, offload: {optimizer: cpu}}"], "engine.offload", "parts are for zero1, zero2 and zero3"),
    (["engine={name: zero2, offload: {parameters: cpu}}"], "engine.offload.parameters", "only zero3"),
    (["engine={name: zero1, offload: {optimizer: nvme, nvme_path: x}}"], "engine.offload.optimizer", "only zero3"),
    (["engine={name: zero3, offload: {optimizer: nvme}}"], "engine.offload.nvme_path", "needs a folder"),
    (["engine={name: zero3, offload: {nvme_path: x}}"], "engine.offload.nvme_path", "remove it"),
    (["engine={name: zero2, reduce_every: step}", "train.accumulation=2"], "engine.reduce_every", "micro_batch"),
    (["engine={name: zero3, reduce_every: step}", "train.accumulation=2"], "engine.reduce_every", "micro_batch"),
    (
        ["precision.overrides.reduce=float32", "engine.reduce_every=step", "train.accumulation=2"],
        "precision.overrides.reduce",
        "use engine.reduce_every: micro_batch",
    ),
    (["engine.unit_classes=[]"], "engine.unit_classes", "empty list"),
]


@pytest.mark.parametrize(("overrides", "field", "what"), BAD)
def test_refused(overrides: list[str], field: str, what: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(GOOD, overrides=overrides)
    (problem,) = caught.value.problems
    assert problem.field.rsplit(" ", 1)[-1] == field
    assert what in problem.what


ALLOWED = [
    ["train.steps=null", "train.epochs=0.5"],
    ["train.schedule.warmup_steps=10"],
    ["train.optimizer={name: sgd, momentum: 0.9}"],
    ["model.path=null", "model.config={model_type: llama}", "model.tokenizer=t"],
    ["data.held_out=3", "data.rows=4", "train.evaluate_every=2"],
    ["data.held_out=rows.jsonl", "train.evaluate_every=2"],
    ["data.format=prompt_completion", "data.columns={prompt: question, completion: answer}"],
    [TEMPLATE, "data.response_marker=' A:'", "data.columns={question: q}"],
    [TEMPLATE, "data.loss_on=all"],
    ["data.template='{{x}} {a}{b}'", "data.response_marker='{x}'"],
    ["precision={regime: mixed, low_dtype: float16}"],
    ["precision={regime: full, low_dtype: float16}"],
    ["engine={name: hsdp, ranks: 6, shard_ranks: 3}"],
    ["engine={name: hsdp, ranks: 4}"],
    ["engine={name: hsdp, ranks: 3}"],
    ["engine={name: fsdp, reshard_after_forward: false, forward_prefetch: 1, backward_prefetch: 2, offload: cpu}"],
    ["engine={name: zero3, offload: {parameters: nvme, optimizer: cpu, nvme_path: x}, persistent_elements: 0}"],
    ["engine={name: zero1, reduce_every: step, bucket_elements: 7}", "train.accumulation=4"],
    ["engine={name: zero3, reduce_every: step}"],
    ["engine={name: single, ranks: 4, ignored_modules: ['*.gate']}"],
]


@pytest.mark.parametrize("overrides", ALLOWED)
def test_allowed(overrides: list[str]) -> None:
    parse(GOOD, overrides=overrides)


def test_checks_read_fields_that_exist() -> None:
    known = {".".join(map(str, path)) for path, _ in field_paths()}
    assert {name for check in CHECKS for name in check.reads} <= known
