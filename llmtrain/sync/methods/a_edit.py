"""A-EDiT (Cheng et al., arXiv 2412.07210, ICLR 2025): EDiT with timed rounds, in which fast replicas do not wait for slow ones.

Rule      each replica trains until T seconds have passed since the last exchange of step counts, on a clock that its ranks
          share. It then waits for the other replicas, which are at most one step behind, and all run EDiT's
          synchronization. A replica's learning rate follows its own steps. The run ends when all replicas together
          have trained on the run's tokens.
Traffic   per round, 2 (N-1)/N x 4 bytes x parameters from each replica, one block at a time, plus one scalar per
          block; within a replica two numbers per step.
Memory    anchor and outer momentum: 8 bytes per parameter, sharded like the parameters; in CPU memory with `sync.offload`.
Defaults  T = 600 s and at least 100 steps over all replicas, from the published code; all others are EDiT's.
Differs   like EDiT. In addition, time is kept in float64 (the published code's float32 ticks every 128 s), weights by steps
          count the steps of the round (there, all steps since the start), and rounds are bounded by time and by the number
          of remaining steps, so that the run ends at most one step per replica beyond its tokens.
"""

PAPER = "arXiv 2412.07210"
CHOOSE_WHEN = "some machines are always slower"
PRESET = {
    "warmup_steps": 1000,
    "period": {"kind": "seconds", "every": 600.0, "min_steps": 100},
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
        "step_weight": 0.0,
    },
    "schedule": "layerwise",
}
