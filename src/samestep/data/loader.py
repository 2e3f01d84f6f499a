"""Loader: the rows of every optimizer step, as a pure function of the step's index."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from samestep.data.examples import Examples
from samestep.data.order import permutation
from samestep.errors import DataError

IGNORED = -100
"""Label of a position that does not count in the loss."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one rank works on in one micro-batch. Rows are padded on the right to the longest of them."""

    input_ids: torch.Tensor
    """int64 [rows, length]"""
    labels: torch.Tensor
    """int64 [rows, length], shifted: labels[i, t] is the token to predict at position t, input_ids[i, t + 1], or -100
    where nothing counts. They go beside the logits as they are."""
    position_ids: torch.Tensor | None
    """int64 [rows, length], with packing only: begins at 0 in every document; 0 on padding."""
    document_ids: torch.Tensor | None
    """int64 [rows, length], with packing only: number of the document in the row; -1 on padding. A position may attend
    to earlier positions of its own document only."""
    label_tokens: int
    """Labels that are not -100."""
    tokens: int
    """Tokens that are not padding; 0 for a batch that only keeps an idle rank in step."""


class Loader:
    """Cuts examples into optimizer steps.

    The order of an epoch is `permutation(rows, seed, epoch)` or, without shuffle, that of the examples. Step s of an
    epoch takes the rows from s * ranks * micro_batch * accumulation on; its micro-batch k on rank r takes
    micro_batch of these rows from (k * ranks + r) * micro_batch on. So a step's rows depend only on the product
    of the three numbers, and nothing but the step's index is needed to go on with a run.

    No step crosses an epoch: the last one of an epoch is short, or left out with drop_last. For evaluation take
    accumulation 1, shuffle and drop_last false, and idle_ranks true: the steps of epoch 0 hold every row once.
    """

    def __init__(
        self,
        examples: Examples,
        *,
        ranks: int,
        micro_batch: int,
        accumulation: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        pad_id: int,
        idle_ranks: bool = False,
    ) -> None:
        """`pad_id` fills up short rows; under a causal mask it changes no number.

        Raises DataError when there are fewer examples than ranks (unless `idle_ranks`), or no full step to keep.
        """
        self.examples = examples
        self.ranks = ranks
        self.micro_batch = micro_batch
        self.rows_per_step = ranks * micro_batch * accumulation
        self.seed = seed
        self.shuffle = shuffle
        self.pad_id = pad_id
        full, rest = divmod(len(examples), self.rows_per_step)
        self.steps_per_epoch = full + (rest > 0 and not drop_last)
        self._epoch_order: tuple[int, np.ndarray] | None = None
        if len(examples) < ranks and not idle_ranks:
            raise DataError(
                f"{ranks} ranks are more than the {len(examples)} rows of data.",
                where="engine.ranks",
                remedy="Use fewer ranks or more rows.",
            )
        if not self.steps_per_epoch:
            raise DataError(
                f"a step takes {self.rows_per_step} rows ({ranks} ranks x micro_batch {micro_batch} x accumulation "
                f"{accumulation}), there are {len(examples)}, and short steps are dropped.",
                where="data.drop_last",
                remedy="Set it to false, or make the step smaller.",
            )

    def step(self, index: int) -> GlobalStep:
        """Optimizer step `index`, counted from 0 over all epochs."""
        epoch, step = divmod(index, self.steps_per_epoch)
        rows = self._order(epoch)[step * self.rows_per_step : (step + 1) * self.rows_per_step]
        return GlobalStep(self, epoch, rows)

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.examples))
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = epoch, permutation(len(self.examples), seed=self.seed, stream=epoch)
        return self._epoch_order[1]


class GlobalStep:
    """One optimizer step: the rows of all ranks and micro-batches."""

    def __init__(self, loader: Loader, epoch: int, rows: np.ndarray) -> None:
        self.epoch = epoch
        self.rows = rows
        """int64 [rows]: numbers of the examples."""
        self.label_tokens = int(loader.examples.row_label_tokens[rows].sum())
        """Tokens that count in the loss, of all ranks and micro-batches."""
        self.tokens = int(loader.examples.row_tokens[rows].sum())
        """Tokens of all ranks and micro-batches, without padding."""
        self.micro_steps = -(-len(rows) // (loader.ranks * loader.micro_batch))
        """Micro-batches on every rank."""
        self._loader = loader

    def batch(self, micro: int, rank: int) -> Batch:
        """The batch of a rank in micro-batch `micro`.

        Every rank has a batch in every micro-batch, so that all do the same number of forward passes: one without rows
        gets the first row of the step with nothing that counts.
        """
        loader = self._loader
        if not (0 <= micro < self.micro_steps and 0 <= rank < loader.ranks):
            raise IndexError(f"micro-batch {micro} of {self.micro_steps}, rank {rank} of {loader.ranks}")
        begin = (micro * loader.ranks + rank) * loader.micro_batch
        rows = self.rows[begin : begin + loader.micro_batch]
        if len(rows):
            return _collate(loader.examples, rows, loader.pad_id, idle=False)
        return _collate(loader.examples, self.rows[:1], loader.pad_id, idle=True)


def _collate(examples: Examples, rows: np.ndarray, pad_id: int, *, idle: bool) -> Batch:
    shape = len(rows), int(examples.row_tokens[rows].max())
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    packed = examples.document_starts is not None
    position_ids = np.zeros(shape, dtype=np.int64) if packed else None
    document_ids = np.full(shape, -1, dtype=np.int64) if packed else None
    for place, index in enumerate(rows):
        ids, counts = examples.row(index)
        input_ids[place, : len(ids)] = ids
        if not idle:
            labels[place, : len(ids) - 1] = np.where(counts[1:], ids[1:], IGNORED)
        if position_ids is not None and document_ids is not None:
            starts = examples.row_documents(index)
            document_ids[place, : len(ids)] = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
            position_ids[place, : len(ids)] = np.arange(len(ids)) - np.repeat(starts[:-1], np.diff(starts))
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        position_ids=None if position_ids is None else torch.from_numpy(position_ids),
        document_ids=None if document_ids is None else torch.from_numpy(document_ids),
        label_tokens=0 if idle else int(examples.row_label_tokens[rows].sum()),
        tokens=0 if idle else int(examples.row_tokens[rows].sum()),
    )
