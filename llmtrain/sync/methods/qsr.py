"""QSR (Gu et al., arXiv 2310.14423, ICLR 2024): Local SGD whose rounds grow as the learning rate falls.

The paper's aim is generalization: local steps regularize implicitly, and rounds that grow like 1/lr^2 keep that effect.

Rule      a round that starts at learning rate lr has H = max(base, floor((alpha / lr)^2)) local steps; then
          theta <- (1/N) sum_n theta_n. While the learning rate warms up, H follows from its peak. The last round
          is shortened so that the run ends synchronized. Each replica keeps its inner optimizer state.
Traffic   per round, 2 (N-1)/N x 4 bytes x parameters from each replica.
Memory    nothing beyond the inner optimizer.
Defaults  base 4 is the paper's for ViT-B, with alpha = 0.0175 at a peak of 8e-3 (2.2 times the peak); alpha is in units
          of the learning rate, so a recipe must set it.
          `sync.period.power=1` gives rounds in inverse proportion to the learning rate, as the published code can.
Differs   the warm-up follows the paper's rule (from memory); the published code uses `base` there, which gives the same H with
          its values.
"""

PAPER = "arXiv 2310.14423"
CHOOSE_WHEN = "the run is long, with learning-rate decay"
PRESET = {
    "warmup_steps": 0,
    "period": {"kind": "qsr", "base": 4},
    "outer": {"kind": "average"},
    "reduction": "mean",
    "schedule": "blocking",
}
