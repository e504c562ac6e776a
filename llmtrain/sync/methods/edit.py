"""EDiT (Cheng et al., arXiv 2412.07210, ICLR 2025): DiLoCo layer by layer inside the forward pass, with a penalty.

Rule      per block l, after H local steps, inside the next forward pass and before l is gathered:
          G_n = ||anchor - theta_n|| over the whole block; a replica whose G_n lies more than z deviations above its
          running mean is left out; w = softmax(-G / T) over the others; D = sum_n w_n (anchor - theta_n);
          D <- D min(phi / (||D|| + 1e-6), 1); outer Nesterov as in DiLoCo; theta_n <- anchor.
          Every replica left out: no outer step, theta_n <- anchor (rollback).
Traffic   per round, 2 (N-1)/N x 4 bytes x parameters from each replica, one block at a time, plus one scalar a
          block; inside a replica two scalars a block.
Memory    anchor and outer momentum: 8 bytes a parameter, sharded like the parameters; on the CPU with `offload`.
Values    H = 128, warm-up 1000, outer lr 0.8 and momentum 0.85, phi = 10, alpha = 0.02, z = 3: the paper's as recalled.
Departs   statistics are bias-corrected and never fed with outliers (the published code does neither); the test starts
          after 10 rounds (the paper's number is unknown; 120 in the published code, 10 in its example); whether
          everybody is anomalous is decided on the gathered norms, so shards of a block can't disagree.
"""

PAPER = "arXiv 2412.07210"
PRESET = {
    "warmup_steps": 1000,
    "period": {"kind": "steps", "every": 128},
    "outer": {"kind": "nesterov", "lr": 0.8, "momentum": 0.85},
    "reduction": {"kind": "edit_penalty", "z": 3.0, "ema": 0.02, "min_rounds": 10, "temperature": 1.0, "clip": 10.0},
    "schedule": "layerwise",
}
