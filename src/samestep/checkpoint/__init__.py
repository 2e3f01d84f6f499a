"""What leaves a run: weights gathered from any engine, and exports."""
