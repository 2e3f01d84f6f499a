"""Checkpoints that other tools make in one process, and what their live tensors were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.distributed.foreign_jobs import live_torch, plain_steps, two_groups
from tests.small_runs import make_model

Live = dict[str, torch.Tensor]


def accelerate(out: Path, *, safe: bool = True) -> Live:
    """accelerate's save_state of a run without sharding, with a schedule."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    try:
        accelerator = Accelerator(cpu=True)
        plain = make_model()
        inner = torch.optim.AdamW(two_groups(plain), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda _: 1.0)
        model, optimizer, _ = accelerator.prepare(plain, inner, schedule)
        plain_steps(model, optimizer)
        live = live_torch(plain, inner)
        accelerator.save_state(str(out), safe_serialization=safe)
        return live
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def trainer(out: Path, *, model: Any = None, **settings: Any) -> Live:
    """A transformers Trainer's checkpoint-3, of rows of random tokens."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Keep(TrainerCallback):
        """The live tensors of the step that is saved."""

        def __init__(self) -> None:
            self.live: Live = {}

        def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            optimizer = others["optimizer"]
            self.live = live_torch(others["model"], getattr(optimizer, "optimizer", optimizer))

    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(2, 17, (8,), generator=generator) for _ in range(6)]
    rows: Any = [{"input_ids": row, "labels": row} for row in ids]
    keep = Keep()
    defaults: dict[str, Any] = {"weight_decay": 0.1, "learning_rate": 1e-2, "per_device_train_batch_size": 2}
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=3,
        save_steps=3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **(defaults | settings),
    )
    Trainer(
        model=model or make_model(),
        args=arguments,
        train_dataset=rows,
        callbacks=[keep],
    ).train()
    return keep.live


def torch_file(out: Path, *, change: Callable[[dict[str, Any]], None] | None = None, named: bool = False) -> Live:
    """One torch.save file of a script: model and optimizer."""
    model = make_model()
    groups = two_groups(model)
    if named:
        names = {id(p): name for name, p in model.named_parameters()}
        groups = [{**group, "params": [(names[id(p)], p) for p in group["params"]]} for group in groups]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    plain_steps(model, optimizer)
    content: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    live = live_torch(model, optimizer)
    if change is not None:
        change(content)
    torch.save(content, out)
    return live
