"""CO2 (Sun et al., arXiv 2401.16265, ICLR 2024): Local SGD whose reductions overlap with a whole round.

Rule      at the end of round k, replica n sends D_k,n = anchor_k - theta_n and receives the mean D_(k-1) of the round
          before: m <- beta m + D_(k-1) / L, with every element of m limited to [-phi, phi]; anchor_(k+1) <- anchor_k - lr m;
          theta_n <- anchor_(k+1). L >= 1 is the staleness gap: the mean learning rate of round k-1
          over that of round k. The last mean is applied at the end of the run. With several fragments
          (`sync.schedule.fragments`), each has its own such rounds, which end in turn at even intervals.
Traffic   per round, 2 (N-1)/N x 4 bytes x parameters from each replica, hidden behind the next round.
Memory    anchor, momentum and the mean in flight: 12 bytes per parameter, sharded like the parameters (the paper's CO2*).
Defaults  H = 48, lr = 1 and phi = 1 are the published code's, which does not clip by default. phi is in units of the parameters, so
          phi = 1 is wide: to have an effect, phi must be near the largest change of a parameter per round, or below it. beta = 0.2
          is that of the code's example with GPT-2; its default is 0.5. Because the mean is one round late, the steps grow if a
          round covers more than (1 - beta) / lr of the distance to a minimum: more than 0.5 of it with beta = 0.5, more than 0.8
          with beta = 0.2.
Differs   the paper's exact L, which also depends on the parameters, was not available to us: ours follows from the
          learning rates and is 1 while they are constant. The published code clips only if asked to, and then computes
          the clipped momentum but does not use it. It averages parameters while training changes them or, by default,
          waits for the present ones. Here clipping takes effect, messages are copies, and means are one round old.
"""

PAPER = "arXiv 2401.16265"
CHOOSE_WHEN = "fp32 messages take a round; it needs tuning"
PRESET = {
    "warmup_steps": 0,
    "period": {"kind": "steps", "every": 48},
    "outer": {"kind": "momentum", "lr": 1.0, "momentum": 0.2, "clip": 1.0},
    "reduction": "mean",
    "schedule": {"kind": "delayed", "gap_penalty": True},
}
