"""Train language models on FSDP, DeepSpeed ZeRO, DDP or one process, and get the same steps."""
