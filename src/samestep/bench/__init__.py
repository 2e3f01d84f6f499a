"""Throughput side by side: floating-point operations, peaks of devices, and runs that take turns."""
