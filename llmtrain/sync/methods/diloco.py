"""DiLoCo (Douillard et al., arXiv 2311.08105): AdamW inside, Nesterov momentum on the averaged pseudo-gradient outside.

Rule      D = (1/N) sum_n (anchor - theta_n) after H local steps; b <- mu b + D;
          anchor <- anchor - lr (D + mu b); theta_n <- anchor. Each replica keeps its inner optimizer state.
Traffic   per round, 2 (N-1)/N x 4 bytes x parameters from each replica.
Memory    anchor and outer momentum: 8 bytes per parameter, sharded like the parameters; in CPU memory with `sync.offload`.
Defaults  H = 500, outer lr 0.7 and momentum 0.9 are the paper's (from memory; OpenDiLoCo's README agrees).
Differs   the paper starts from a model pretrained for 24 k steps on one worker; `sync.warmup_steps` replaces that.
"""

PAPER = "arXiv 2311.08105"
CHOOSE_WHEN = "you can synchronize only every few hundred steps"
PRESET = {
    "warmup_steps": 0,
    "period": {"kind": "steps", "every": 500},
    "outer": {"kind": "nesterov", "lr": 0.7, "momentum": 0.9},
    "reduction": "mean",
    "schedule": "blocking",
}
