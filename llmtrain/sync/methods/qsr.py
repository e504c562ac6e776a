"""QSR (Gu et al., arXiv 2310.14423, ICLR 2024): Local SGD whose rounds grow as the learning rate falls.

Rule      a round that starts at learning rate lr has H = max(base, floor((alpha / lr)^2)) local steps; then
          theta <- (1/N) sum_n theta_n. While the learning rate warms up, H is what its peak gives; the last round is
          cut so that the run ends synchronized. Inner optimizer states stay with their replica.
Traffic   per round, 2 (N-1)/N x 4 bytes x parameters from each replica.
Memory    nothing beyond the inner optimizer.
Values    base 4 is the paper's for ViT-B, with alpha = 0.0175 at a peak of 8e-3 (2.2 times the peak); alpha is in units
          of the learning rate, so a recipe has to give it.
Departs   in the warm-up the paper's rule (recalled) is used, the published code takes `base`; its values agree.
"""

PAPER = "arXiv 2310.14423"
PRESET = {
    "warmup_steps": 0,
    "period": {"kind": "qsr", "base": 4},
    "outer": {"kind": "average"},
    "reduction": "mean",
    "schedule": "blocking",
}
