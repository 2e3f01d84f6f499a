"""Train language models on FSDP, DeepSpeed ZeRO, DDP or one process, and get the same steps."""

from __future__ import annotations

import logging

__version__ = "0.1.0"

# Where torchao is installed, transformers imports it, whatever the run; it then complains about libraries of its own
# that are for other devices, and torch about its enums.
for _noisy in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)
