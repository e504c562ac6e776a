"""EDiT (Cheng et al., arXiv 2412.07210, ICLR 2025): DiLoCo layer by layer inside the forward pass, with a pseudo-gradient penalty.

Rule      per block l, after H local steps, inside the next forward pass and before l is gathered:
          G_n = ||anchor - theta_n|| over the whole block; a replica whose G_n is more than z standard deviations above
          its running mean is excluded; w = softmax(-G / T) over the others; D = sum_n w_n (anchor - theta_n);
          D <- D min(phi / (||D|| + 1e-6), 1); outer Nesterov as in DiLoCo; theta_n <- anchor.
          If every replica is excluded, there is no outer step, and theta_n <- anchor (rollback).
Traffic   per round, 2 (N-1)/N x 4 bytes x parameters from each replica, one block at a time, plus one scalar per
          block; within a replica two scalars per block.
Memory    anchor and outer momentum: 8 bytes per parameter, sharded like the parameters; in CPU memory with `sync.offload`.
Defaults  H = 128, warm-up 1000, outer lr 0.8 and momentum 0.85, phi = 10, alpha = 0.02, z = 3: the paper's, from memory and
          unverified. The published code's README has outer lr 0.7, momentum 0.8 and no clip.
Differs   the norms of all blocks are gathered at the first block, not one by one. Running statistics are bias-corrected
          (the published code's are not). By default they describe norms per summed learning rate. In a round with fewer steps
          than usual, these norms are multiplied by sqrt(steps / usual steps), or by steps / usual steps if the schedule mixes
          the anchor with a replica's own parameters. An excluded norm enters the statistics up to a bound, so that a lasting
          rise of up to 100 times is followed within 15 rounds (with `statistics: paper`, excluded norms never enter, and such
          a replica stays excluded). The test starts after 10 rounds (120 in the published code, 10 in its example; the
          paper's number is unknown to us). A rollback is decided on the gathered norms, so that the shards of a block agree.
          A block that is excluded 20 rounds in a row ends the run.
"""

PAPER = "arXiv 2412.07210"
CHOOSE_WHEN = "updates may be abnormally large"
PRESET = {
    "warmup_steps": 1000,
    "period": {"kind": "steps", "every": 128},
    "outer": {"kind": "nesterov", "lr": 0.8, "momentum": 0.85},
    "reduction": {
        "kind": "edit_penalty",
        "z": 3.0,
        "ema": 0.02,
        "min_rounds": 10,
        "statistics": "adaptive",
        "max_exclusions": 20,
        "temperature": 1.0,
        "clip": 10.0,
    },
    "schedule": "layerwise",
}
