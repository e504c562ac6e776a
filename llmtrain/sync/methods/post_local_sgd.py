"""Post-local SGD (Lin et al., arXiv 1808.07217, ICLR 2020): synchronous at first, Local SGD once the learning rate falls.

Rule      gradients are averaged in every step until the learning rate has first dropped; from then on replicas train
          alone and theta <- (1/N) sum_n theta_n after every H local steps. Inner optimizer states stay with their replica.
Traffic   per synchronous step and per round, 2 (N-1)/N x 4 bytes x parameters from each replica.
Memory    nothing beyond the inner optimizer.
Values    H = 16 is the published example's (CIFAR-10, local from the first decay on). With schedules that fall
          smoothly, "the first decay" is chosen as half the peak; `sync.warmup_steps` names a step instead.
Departs   the paper's inner optimizer is SGD with momentum; here it is the recipe's.
"""

PAPER = "arXiv 1808.07217"
PRESET = {
    "warmup_steps": 0,
    "warmup_until_lr": 0.5,
    "period": {"kind": "steps", "every": 16},
    "outer": {"kind": "average"},
    "reduction": "mean",
    "schedule": "blocking",
}
