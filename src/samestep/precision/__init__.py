"""Which dtype each role has: planned, applied, observed, verified."""
