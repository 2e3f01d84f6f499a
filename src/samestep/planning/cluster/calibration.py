"""The share of a device's peak that matrix multiplications reach in training, from published results.

One number for a kind of device, the same for all models and engines: it makes the mean error zero over the rows that
`benchmarks/published_throughput.py` marks as calibrating, the first of each source. All other rows are held out.
"""

from __future__ import annotations

# By the name in the table of devices.
MATMUL_EFFICIENCY = {"A100-40GB": 0.62, "A100-80GB": 0.62, "H100-SXM": 0.43}

# The least and the greatest share of the predicted throughput that a held-out published result reached.
REACHED = (0.82, 1.60)
