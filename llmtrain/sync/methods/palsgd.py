"""PALSGD (Naganuma et al., arXiv 2504.18454, TMLR 2025): DiLoCo with random steps that pull toward the anchor and compute no gradient.

Rule      in every local step each replica draws independently: with probability p it computes no gradient, but
          theta_n <- theta_n - (lr eta / p)(theta_n - anchor); otherwise it takes an inner step at learning rate lr / (1 - p).
          DiLoCo's outer step follows after H steps. The expectation of a step is lr times (inner step + eta (theta_n - anchor)).
Traffic   per round, 2 (N-1)/N x 4 bytes x parameters from each replica; pulls send nothing.
Memory    anchor and outer momentum: 8 bytes per parameter, sharded like the parameters; in CPU memory with `sync.offload`.
Defaults  p = 0.2, eta = 1, H = 32 after 32 synchronous steps, momentum 0.9: from the published example; the paper's own are not
          known to us. Outer lr 0.7 is DiLoCo's. With momentum 0.9, a constant D then moves the anchor by
          0.7 / (1 - 0.9) = 7 D per outer step. With the example's 0.1 it moves by 1.0 D, but the example takes 16 outer steps per
          round.
Differs   all tensors are pulled (the published code pulls the first one only), replicas draw independently (there, all
          alike), there is one outer step per round (there, one per micro-batch), a pull keeps its batch for the next
          gradient (there, it is lost: `sync.pull.batch=drop`), and the synchronous phase does not average optimizer states.
"""

PAPER = "arXiv 2504.18454"
CHOOSE_WHEN = "you study steps without gradients"
PRESET = {
    "warmup_steps": 32,
    "period": {"kind": "steps", "every": 32},
    "outer": {"kind": "nesterov", "lr": 0.7, "momentum": 0.9},
    "reduction": "mean",
    "schedule": "blocking",
    "pull": {"probability": 0.2, "strength": 1.0, "batch": "keep"},
}
