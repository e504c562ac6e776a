"""SNOO (Kallusky et al., arXiv 2510.15830): DiLoCo's outer step on one replica, as a better optimizer.

Rule      after every H steps of the inner optimizer, D = anchor - theta; b <- mu b + D; anchor <- anchor - lr (D + mu b);
          theta <- anchor. With several replicas, D is their mean, and the method is DiLoCo.
Traffic   none with one replica.
Memory    anchor and outer momentum: 8 bytes per parameter, sharded like the parameters; in CPU memory with `sync.offload`.
Defaults  H = 30, outer lr 0.7 and momentum 0.8: what the MuLoCo paper reports for DiLoCo with one worker.
Differs   the paper's own settings were not available to us.
"""

PAPER = "arXiv 2510.15830"
CHOOSE_WHEN = "you study the outer step without averaging"
FOR_ONE_REPLICA = True
PRESET = {
    "warmup_steps": 0,
    "period": {"kind": "steps", "every": 30},
    "outer": {"kind": "nesterov", "lr": 0.7, "momentum": 0.8},
    "reduction": "mean",
    "schedule": "blocking",
}
