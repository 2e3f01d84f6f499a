"""Train language models on FSDP, DeepSpeed ZeRO, DDP or one process, and get the same steps."""

from __future__ import annotations

__version__ = "0.1.0"
