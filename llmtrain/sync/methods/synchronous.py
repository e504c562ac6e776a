"""Synchronous data parallelism: the baseline of all other methods.

Rule      g = (1/N) sum_n g_n in every step, then the inner optimizer; all replicas hold the same parameters.
Traffic   per step, 2 (N-1)/N x 4 bytes x parameters from each replica, overlapped with backward.
Memory    nothing beyond the inner optimizer.
Differs   not at all.
"""

PAPER = "mini-batch SGD / data parallelism"
CHOOSE_WHEN = "the network keeps up, or as the baseline"
PRESET = {"period": {"kind": "every_step"}, "outer": {"kind": "average"}, "reduction": "mean", "schedule": "blocking"}
