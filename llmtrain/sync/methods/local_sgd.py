"""Local SGD (Stich, arXiv 1805.09767): replicas train alone and average their parameters every H steps.

Rule      after H local steps, theta <- (1/N) sum_n theta_n. Each replica keeps its inner optimizer state.
Traffic   per round, 2 (N-1)/N x 4 bytes x parameters from each replica.
Memory    nothing beyond the inner optimizer: parameters are averaged directly, without an anchor.
Differs   the paper's inner optimizer is SGD; here it is the recipe's.
"""

PAPER = "arXiv 1805.09767"
CHOOSE_WHEN = "you want simplicity, or memory is short"
PRESET = {
    "warmup_steps": 0,
    "period": {"kind": "steps", "every": 32},
    "outer": {"kind": "average"},
    "reduction": "mean",
    "schedule": "blocking",
}
