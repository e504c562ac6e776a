"""Streaming DiLoCo (Douillard et al., arXiv 2501.18512): DiLoCo fragment by fragment, while training goes on.

Rule      the blocks are dealt to P fragments; fragment p's turn comes at (p + 1) H / P of every round of H steps. At its turn
          it sends anchor_p - theta_p; d local steps later the mean D has arrived: anchor_p <- OuterNesterov(anchor_p, D),
          theta_p <- alpha theta_p + (1 - alpha) anchor_p.
Traffic   per round, 2 (N-1)/N x 0.53 bytes x parameters from each replica on the int4 wire; at most a fragment at once.
Memory    anchor, outer momentum and one fragment's mean: 8 bytes a parameter and 4 x the largest fragment.
Values    H = 100, d = 5, alpha = 0.5 and outer lr 0.4 are the paper's; momentum 0.9 is DiLoCo's. Fragments of 3 layers
          each are the paper's choice; 4 fragments are that for 12 layers.
Departs   the paper's 4-bit numbers are E3M0; here they are integers that share a scale with 127 others, rounded once more
          when the mean is sent back.
"""

PAPER = "arXiv 2501.18512"
PRESET = {
    "warmup_steps": 0,
    "period": {"kind": "steps", "every": 100},
    "outer": {"kind": "nesterov", "lr": 0.4, "momentum": 0.9},
    "reduction": "mean",
    "schedule": {"kind": "overlapped", "steps": 5, "fragments": 4, "fragment_layout": "strided", "alpha": 0.5},
    "wire": "int4",
}
