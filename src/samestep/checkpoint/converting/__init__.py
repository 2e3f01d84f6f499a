"""Our checkpoints, written as other tools' own."""
