"""Post-local SGD (Lin et al., arXiv 1808.07217, ICLR 2020): synchronous at first, and Local SGD once the learning rate falls.

Rule      gradients are averaged in every step until the learning rate first drops; from then on replicas train alone,
          and theta <- (1/N) sum_n theta_n after every H local steps. Each replica keeps its inner optimizer state.
Traffic   per synchronous step and per round, 2 (N-1)/N x 4 bytes x parameters from each replica.
Memory    nothing beyond the inner optimizer.
Defaults  H = 16 is the published example's (CIFAR-10, local from the first decay on). For smooth schedules
          we take half of the peak as "the first decay"; `sync.warmup_steps` gives a step instead.
Differs   the paper's inner optimizer is SGD with momentum; here it is the recipe's.
"""

PAPER = "arXiv 1808.07217"
CHOOSE_WHEN = "local steps hurt early in training"
PRESET = {
    "warmup_steps": 0,
    "warmup_until_lr": 0.5,
    "period": {"kind": "steps", "every": 16},
    "outer": {"kind": "average"},
    "reduction": "mean",
    "schedule": "blocking",
}
