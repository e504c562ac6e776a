"""Streaming DiLoCo (Douillard et al., arXiv 2501.18512): DiLoCo fragment by fragment, while training continues.

Rule      the blocks form P fragments. In every round of H steps, fragment p sends anchor_p - theta_p at step (p + 1) H / P.
          After d more local steps the mean D is applied: anchor_p <- OuterNesterov(anchor_p, D),
          theta_p <- alpha theta_p + (1 - alpha) anchor_p.
Traffic   per round, 2 (N-1)/N x 0.53 bytes x parameters from each replica in the int4 format; at most one fragment at once.
Memory    anchor, outer momentum and one fragment's mean: 8 bytes per parameter and 4 x the largest fragment.
Defaults  H = 100, d = 5, alpha = 0.5 and outer lr 0.4 are the paper's; momentum 0.9 is DiLoCo's. The
          paper's fragments have 3 layers; with 12 layers that is 4 fragments.
Differs   the paper's 4-bit numbers are E3M0; here they are integers, of which 128 share a scale, and the mean is rounded
          once more when it is sent back. At the end of a run, fragments that were trained since their last turn take a last
          outer step, and the others end at their anchors. What the paper does there was not available to us.
"""

PAPER = "arXiv 2501.18512"
CHOOSE_WHEN = "the link is slow: start here"
PRESET = {
    "warmup_steps": 0,
    "period": {"kind": "steps", "every": 100},
    "outer": {"kind": "nesterov", "lr": 0.4, "momentum": 0.9},
    "reduction": "mean",
    "schedule": {"kind": "overlapped", "steps": 5, "fragments": 4, "fragment_layout": "strided", "alpha": 0.5},
    "wire": "int4",
}
