"""Checkpoints of other tools, read into ours.

    recognise -> one reader per format (zero, universal, torch_states, sharded) -> match (names of the recipe's model)
    -> writing

A reader gives a `Source`: named tensors that are read when they are asked for, and a list of what it leaves behind.
"""
