"""SlowMo (Wang et al., arXiv 1910.00643, ICLR 2020): Local SGD with slow momentum in units of the learning rate.

Rule      after H local steps at fast learning rate g, D = anchor - (1/N) sum_n theta_n; u <- beta u + D / g;
          anchor <- anchor - alpha g u; theta_n <- anchor. Each replica keeps its inner optimizer state.
Traffic   per round, 2 (N-1)/N x 4 bytes x parameters from each replica.
Memory    anchor and slow momentum: 8 bytes per parameter, sharded like the parameters; in CPU memory with `sync.offload`.
Defaults  alpha = 1, beta = 0.5 and H = 48 are the defaults of a published implementation; the paper has beta 0.4 to 0.8.
Differs   g is the learning rate of the round's last step: the paper holds it constant within a round.
          `sync.outer.normalize=lr_sum` uses the sum over the round instead, for rounds of varying length.
"""

PAPER = "arXiv 1910.00643"
CHOOSE_WHEN = "round length or learning rate varies a lot"
PRESET = {
    "warmup_steps": 0,
    "period": {"kind": "steps", "every": 48},
    "outer": {"kind": "momentum", "lr": 1.0, "momentum": 0.5, "normalize": "lr"},
    "reduction": "mean",
    "schedule": "blocking",
}
