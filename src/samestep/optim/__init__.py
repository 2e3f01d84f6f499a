"""Optimizers and learning rate schedules. The optimizer is the same one on every engine; a schedule is a pure function
of the optimizer step."""

from samestep.optim.builders import OptimizerFactory, factory, is_decayed, prepare_state, set_lr
from samestep.optim.low_precision import LowPrecisionAdamW, Piece
from samestep.optim.schedules import lr_at
from samestep.optim.updates import wanted_update

__all__ = [
    "LowPrecisionAdamW",
    "OptimizerFactory",
    "Piece",
    "factory",
    "is_decayed",
    "lr_at",
    "prepare_state",
    "set_lr",
    "wanted_update",
]
