"""Synchronous data parallelism: the baseline every other method is measured against.

Rule      g = (1/N) sum_n g_n in every step, then the inner optimizer; all replicas stay equal.
Traffic   per step, 2 (N-1)/N x 4 bytes x parameters from each replica, overlapped with backward.
Memory    nothing beyond the inner optimizer.
Departs   in nothing.
"""

PAPER = "mini-batch SGD / data parallelism"
PRESET = {"period": {"kind": "every_step"}, "outer": {"kind": "average"}, "reduction": "mean", "schedule": "blocking"}
