"""CO2 (Sun et al., arXiv 2401.16265, ICLR 2024): Local SGD whose reductions have a whole round to arrive.

Rule      at the end of round k, replica n sends D_k,n = anchor_k - theta_n, and takes the mean that was sent a round
          before: m <- beta m + D_(k-1) / L, every element of m kept within [-phi, phi]; anchor_(k+1) <- anchor_k - lr m;
          theta_n <- anchor_(k+1). L >= 1 is the staleness gap: round k-1's summed learning rates over round k's.
          The run's last mean is applied at its end.
Traffic   per round, 2 (N-1)/N x 4 bytes x parameters from each replica, hidden behind the next round.
Memory    anchor, momentum and the mean under way: 12 bytes a parameter, sharded like the parameters (the paper's CO2*).
Values    H = 48, beta = 0.5, lr = 1 and phi = 1 are the published code's defaults. In units of parameters phi = 1 is
          wide: to clip in earnest, choose it near the largest movement of a parameter in a round.
Departs   the paper's exact L was not available to us: ours follows from the learning rates and is 1 while they are
          constant. The published code computes the clipped momentum and drops it, and averages parameters while they are
          being changed; here clipping clips, and what is sent is a copy.
"""

PAPER = "arXiv 2401.16265"
PRESET = {
    "warmup_steps": 0,
    "period": {"kind": "steps", "every": 48},
    "outer": {"kind": "momentum", "lr": 1.0, "momentum": 0.5, "clip": 1.0},
    "reduction": "mean",
    "schedule": {"kind": "delayed", "gap_penalty": True},
}
