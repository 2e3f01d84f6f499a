"""Assets and script of the demo."""
