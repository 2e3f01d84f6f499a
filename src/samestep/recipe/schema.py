"""The recipe: what a run does, as frozen data.

Pure data: no torch, no I/O, no environment. Every default is written out in the resolved recipe that a
run leaves behind. The text under each field is its documentation everywhere: in `samestep init`, in the
JSON Schema and in the docs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

EngineName = Literal["single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"]
RegimeName = Literal["full", "mixed", "mixed-stochastic", "low", "low-stochastic", "low-kahan", "mixed-fp8"]
LowDtype = Literal["bfloat16", "float16"]
DtypeName = Literal["float32", "bfloat16", "float16"]
# What JSON and every library that these numbers reach can hold.
_LARGEST = 2**53
PositiveInt = Annotated[int, Field(gt=0, le=_LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=_LARGEST)]
Steps = Annotated[int, Field(gt=0, le=10_000_000)]
Threads = Annotated[int, Field(gt=0, le=1024)]
Seconds = Annotated[int, Field(gt=0, le=10_000_000)]
# A weight decay or rate beyond the range of fp32 would fail deep inside the optimizer.
Rate = Annotated[float, Field(ge=0, le=1e36)]
Epochs = Annotated[float, Field(gt=0, le=1e6)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the recipe: frozen, unknown keys are errors, no value is coerced into another type."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class Lora(Section):
    """Low-rank adapters (peft). The base model is frozen, the adapters train."""

    rank: PositiveInt = 8
    """Rank of the adapter matrices."""
    alpha: PositiveFloat = 16.0
    """Scale of the adapter: its output is multiplied by alpha / rank."""
    dropout: Fraction = 0.0
    """Dropout probability in front of the adapter."""
    target_modules: list[str] = ["q_proj", "v_proj"]
    """Last part of the names of the linear layers that get an adapter."""
    export_merged: bool = False
    """Export the whole model with the adapters merged into its weights, instead of the adapters alone."""


class Model(Section):
    """Which model trains."""

    path: str | None = None
    """A local folder (relative to the recipe's folder) or a hub id. Leave out to give `config`."""
    config: dict[str, Any] | None = None
    """A transformers config (with `model_type`) for a freshly initialised model, seeded by train.seed."""
    tokenizer: str | None = None
    """A folder or hub id of the tokenizer; null means the model's own."""
    load_dtype: Literal["stored", "float32", "bfloat16", "float16"] = "stored"
    """Dtype the weights are loaded in; `stored` keeps what the file holds. It does not change the regime."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"
    """Attention implementation."""
    freeze: list[str] = []
    """Glob patterns of parameter names that do not train, e.g. ["model.embed_tokens.*"]."""
    lora: Lora | None = None
    """Adapters; null trains the model itself."""


class HubData(Section):
    """A data set of the Hugging Face hub (needs the extra `samestep[data]`)."""

    hub: str
    """Name of the data set, e.g. "openai/gsm8k"."""
    name: str | None = None
    """Configuration of the data set, e.g. "main"."""
    split: str = "train"
    """Split to train on."""


class Data(Section):
    """What the model is trained on."""

    path: str | HubData
    """A .jsonl, .json, .csv or .parquet file, a folder of them, or {hub: NAME, split: train}."""
    format: Literal["alpaca", "prompt_completion", "messages", "text"] = "alpaca"
    """How a row becomes text. alpaca: instruction, input, output; prompt_completion: prompt, completion;
    messages: a list of {role, content} through the tokenizer's chat template; text: one text column.
    Ignored when `template` is given."""
    columns: dict[str, str] = {}
    """Names of the columns in the file, by the name that the format uses: {prompt: question, completion: answer}."""
    template: str | None = None
    """A text over the columns instead of a format: "### Question: {instruction}\\n ### Answer: {output}"."""
    response_marker: str | None = None
    """With `template`: the text up to and including this marker never counts in the loss."""
    loss_on: Literal["completion", "all"] = "completion"
    """Which tokens count in the loss. `text` rows have no prompt: all their tokens count."""
    append_end_token: bool = True
    """Append the tokenizer's end token to every row; it counts in the loss."""
    max_tokens: PositiveInt = 512
    """Longest row, in tokens; with packing, the length of every packed row."""
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to a row of more than max_tokens tokens."""
    unusable: Literal["drop", "error"] = "drop"
    """What happens to a row that is empty or has no token that counts in the loss."""
    packing: bool = False
    """Fill rows of max_tokens with several examples; no example sees another one."""
    rows: PositiveInt | None = None
    """Use the first so many rows only; null means all."""
    held_out: Fraction | NonNegativeInt | str = 0.0
    """Rows kept for evaluation: a share below 1, a number of rows, or the path of a file of its own."""
    shuffle: bool = True
    """A new order each epoch, from train.seed and the epoch alone; false keeps the order of the file."""
    drop_last: bool = False
    """Drop the last, short step of an epoch instead of training on it."""


class LossScale(Section):
    """Dynamic loss scaling, used with float16 only, the same on every engine."""

    initial: PositiveFloat = 65536.0
    """Scale of the first step."""
    growth_interval: PositiveInt = 2000
    """Steps without overflow after which the scale doubles; an overflow halves it and skips the step."""
    minimum: PositiveFloat = 1.0
    """The scale never falls below this."""


class Float8(Section):
    """Float8 matmuls of the regime mixed-fp8, by torchao (needs the extra `samestep[fp8]`). Other regimes ignore it."""

    master: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the masters, and with them of gradients and moments."""
    scaling: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """How many values share one scale, in torchao's words. tensorwise: a whole tensor; gradients are e5m2. rowwise: a
    row; scales are powers of two, gradients e4m3. rowwise_with_gw_hp: rowwise, with the weight gradient in bfloat16."""
    skip: list[str] = ["*lm_head*", "*embed_out*"]
    """Glob patterns of the names of linear layers that stay in bfloat16. So do adapters, ignored modules and layers
    whose sizes are no multiples of 16; the plan lists all of them."""
    emulate: bool = False
    """Multiply in float32 what was rounded to float8, on a device that has no float8. Slow: for tests."""


class Overrides(Section):
    """Dtypes of single roles, instead of the regime's. null: the regime's.

    `reduce` and `frozen` can be chosen freely; for the other roles only what the regime has is accepted, so that a
    recipe can pin what it relies on, and anything else is refused with the regime that has it.
    """

    master: DtypeName | None = None
    """Weights in the optimizer."""
    compute: DtypeName | None = None
    """Forward and backward passes."""
    gradient: DtypeName | None = None
    """Accumulated gradients, as the optimizer gets them."""
    reduce: DtypeName | None = None
    """Gradients on their way between ranks: float32 under a low regime keeps sums over many ranks exact; bfloat16
    under mixed halves the bytes."""
    moments: DtypeName | None = None
    """The optimizer's state."""
    buffer: DtypeName | None = None
    """Buffers of the model, which keep what the model gave them."""
    frozen: DtypeName | None = None
    """Frozen parameters. null: as loaded (on the zero engines: the compute dtype, which is all that they can do)."""
    output: DtypeName | None = None
    """Logits. The loss is always float32."""


class Precision(Section):
    """Which dtype each role has."""

    regime: RegimeName = "mixed"
    """full: fp32 everywhere. mixed: fp32 masters, low-precision compute. low: low precision everywhere.
    mixed-stochastic: mixed, but masters are rounded to compute stochastically, so that no update goes unseen.
    low-stochastic, low-kahan: low, but updates are rounded stochastically, or their rounding errors carried along.
    mixed-fp8: mixed, but linear layers multiply in float8."""
    low_dtype: LowDtype = "bfloat16"
    """The low-precision dtype: bfloat16, or for `mixed` float16."""
    max_lost_update_share: Annotated[float, Field(ge=0, le=1)] | None = 0.5
    """Refuse to start when the forecast share of lost updates is above this; null turns the guard off."""
    overrides: Overrides = Overrides()
    """Dtypes of single roles. `load` and `export` are model.load_dtype and precision.export_dtype."""
    measure_every: PositiveInt = 10
    """Measure the share of lost updates every so many steps (and at the first)."""
    loss_scale: LossScale = LossScale()
    """Loss scaling for float16."""
    fp8: Float8 = Float8()
    """Float8 matmuls of mixed-fp8."""
    export_dtype: Literal["loaded", "float32", "bfloat16", "float16"] = "loaded"
    """Dtype of the exported weights; `loaded` is the dtype that the model was loaded in."""
    export_rounding: Literal["nearest", "stochastic"] | None = None
    """How fp32 masters are rounded to a bfloat16 export; null means stochastic for the stochastic regimes, otherwise
    nearest. The resolved recipe names it."""

    @property
    def loses_updates(self) -> bool:
        """Whether updates are rounded to nearest in low precision, where small ones vanish."""
        return self.regime == "low" or (self.regime == "mixed-fp8" and self.fp8.master != "float32")


class OffloadParts(Section):
    """Offload of the zero engines, part by part."""

    parameters: Literal["none", "cpu", "nvme"] = "none"
    """Where the low-precision parameters live (zero3)."""
    optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where masters and moments live (nvme: zero3)."""
    nvme_path: str | None = None
    """Folder on a local disk, needed for nvme."""


class Engine(Section):
    """What holds and shards the training state."""

    name: EngineName = "fsdp"
    """single: one process. ddp: replicated. fsdp: fully sharded. hsdp: sharded in groups, replicated between
    them. zero1, zero2, zero3: DeepSpeed ZeRO."""
    ranks: PositiveInt = 1
    """Number of ranks (processes). `single` runs the micro-batches of so many ranks in its one process."""
    shard_ranks: PositiveInt | None = None
    """hsdp: ranks in one sharding group; null means half of the ranks, at least one."""
    offload: Literal["none", "cpu"] | OffloadParts = "none"
    """none; cpu (fsdp, hsdp, ddp: parameters, gradients and optimizer; zero: optimizer, and on zero3 parameters);
    or parts of their own for the zero engines."""
    reduce_every: Literal["micro_batch", "step"] = "micro_batch"
    """When gradients cross the ranks: after every micro-batch (every engine can), or once per step after local
    accumulation (single, ddp, fsdp, hsdp, zero1). The last bits of a run depend on it when accumulation > 1."""
    reduce_order: Literal["tree", "backend"] = "tree"
    """Order in which ranks are summed. tree: pairwise by rank, the same on every engine and device. backend: whatever
    the communication library does; faster on some networks, and engines then agree only within rounding."""
    unit_classes: list[str] | None = None
    """Module classes that form one shard unit each; null means the model's own no-split classes."""
    ignored_modules: list[str] = []
    """Glob patterns of module names whose parameters are neither sharded nor cast (fsdp, hsdp, ddp, single).
    They must not train."""
    reshard_after_forward: bool = True
    """fsdp, hsdp: free gathered parameters after the forward pass and gather them again in the backward pass."""
    forward_prefetch: NonNegativeInt = 0
    """fsdp, hsdp: units gathered ahead in the forward pass; 0 leaves it to the engine."""
    backward_prefetch: NonNegativeInt = 0
    """fsdp, hsdp: units gathered ahead in the backward pass; 0 leaves it to the engine."""
    bucket_elements: PositiveInt = 500_000_000
    """zero: elements per reduce and gather bucket, at most; a model with fewer gradients gets a smaller one. Does not
    change numbers."""
    prefetch_elements: NonNegativeInt = 50_000_000
    """zero3: elements gathered ahead. Does not change numbers."""
    live_elements: NonNegativeInt = 1_000_000_000
    """zero3: gathered elements kept at most. Does not change numbers."""
    persistent_elements: NonNegativeInt = 100_000
    """zero3: parameters smaller than this stay gathered. Does not change numbers."""
    threads: Threads = 1
    """CPU threads per rank. On the CPU the last bits of a sum depend on it, so it is never guessed from the machine."""
    timeout_seconds: Seconds = 600
    """A collective that waits longer than this ends the run."""

    @property
    def sharing_ranks(self) -> int:
        """Ranks that hold one copy of the masters together."""
        if self.name == "hsdp":
            return self.shard_ranks or max(1, self.ranks // 2)
        return 1 if self.name in ("single", "ddp") else self.ranks


class Optimizer(Section):
    """The optimizer: torch's own, the same one on every engine."""

    name: Literal["adamw", "sgd"] = "adamw"
    """adamw: torch.optim.AdamW. sgd: torch.optim.SGD."""
    lr: Rate = 1e-5
    """Learning rate at the schedule's factor 1. Never scaled by the number of ranks."""
    betas: list[Fraction] = Field(default=[0.9, 0.999], min_length=2, max_length=2)
    """adamw: decay rates of the two moments."""
    eps: PositiveFloat = 1e-8
    """adamw: added to the root of the second moment."""
    momentum: Fraction = 0.0
    """sgd: momentum."""
    weight_decay: Rate = 0.0
    """Decoupled (adamw) or L2 (sgd) weight decay."""
    no_decay: list[str] = ["*.bias", "*norm*"]
    """Glob patterns of parameter names that are not decayed."""


class Schedule(Section):
    """Learning rate over optimizer steps. Nothing else advances it: not ranks, not micro-batches."""

    name: Literal["constant", "linear", "cosine"] = "linear"
    """After the warm-up: constant; linear to `final_factor` at the last step; cosine likewise."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps in which the rate rises linearly; step s of w uses s / w of it."""
    final_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the learning rate that linear and cosine end at."""


class Train(Section):
    """How long and how the model trains."""

    steps: Steps | None = None
    """Optimizer steps. Give this or `epochs`."""
    epochs: Epochs | None = None
    """Passes over the data; may be a fraction. Resolved to steps when the data is known."""
    micro_batch: PositiveInt = 8
    """Rows per rank and micro-batch."""
    accumulation: PositiveInt = 1
    """Micro-batches per rank and step."""
    optimizer: Optimizer = Optimizer()
    """The optimizer."""
    schedule: Schedule = Schedule()
    """The learning rate schedule."""
    max_grad_norm: PositiveFloat | None = None
    """Clip the global gradient norm to this; null means no clipping, on every engine."""
    seed: NonNegativeInt = 0
    """Seed of the fresh weights, the data order and dropout."""
    evaluate_every: PositiveInt | None = None
    """Evaluate the held-out rows every so many steps (and before the first and after the last); null: only then."""
    activation_checkpointing: bool = False
    """Recompute the activations of each shard unit in the backward pass. Does not change numbers."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """What a non-finite loss or gradient does: end the run, or skip the update."""
    export: bool = True
    """Write the trained model to RUN/export at the end."""


class Checkpoint(Section):
    """Checkpoints, in RUN/checkpoints: any engine at any number of ranks goes on from them. With `every` or `minutes`
    the last step leaves one too. A run that is interrupted always does."""

    every: PositiveInt | None = None
    """Steps between checkpoints; null: none for the sake of steps."""
    minutes: PositiveFloat | None = None
    """Minutes between checkpoints; null: none for the sake of time."""
    keep: PositiveInt = 2
    """Checkpoints kept; older ones are deleted once a newer one is complete."""
    asynchronous: bool = False
    """Go on training while a checkpoint is written, from a copy of the state in host memory."""


class Log(Section):
    """What is shown and recorded. steps.jsonl always has every step."""

    every: PositiveInt = 1
    """Steps between the lines sent to the trackers and the display."""
    trackers: list[Literal["tensorboard", "trackio"]] = []
    """Extra places for the curves; each needs its package (`samestep[trackers]`)."""


class Recipe(Section):
    """One training run."""

    name: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Name of the run; its folder is runs/NAME."""
    model: Model
    """The model."""
    data: Data
    """The data."""
    precision: Precision = Precision()
    """Dtypes."""
    engine: Engine = Engine()
    """The engine."""
    train: Train
    """The training."""
    checkpoint: Checkpoint = Checkpoint()
    """Checkpoints."""
    log: Log = Log()
    """Logging."""
