"""Data: rows of files to batches of tokens.

    files -> formats (chat) -> tokens -> examples (packing) -> loader

`prepare` goes from the recipe's data section to examples, the same on every rank; a `Loader` cuts examples into the
batches of every optimizer step, rank and micro-batch, as a pure function of the step's index.
"""

from samestep.data.examples import Examples
from samestep.data.loader import Batch, GlobalStep, Loader
from samestep.data.preparation import PreparationReport, Prepared, prepare

__all__ = ["Batch", "Examples", "GlobalStep", "Loader", "PreparationReport", "Prepared", "prepare"]
