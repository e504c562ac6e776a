"""A-EDiT (Cheng et al., arXiv 2412.07210, ICLR 2025): EDiT with rounds of seconds, so that nobody waits for a slow replica.

Rule      each replica trains until T seconds have passed since the last meeting, on a clock its ranks share, then meets the
          others, who are at most one step behind; then EDiT's synchronization. Learning rates follow a replica's own
          steps; the run ends when all replicas together have trained on its tokens.
Traffic   per round, 2 (N-1)/N x 4 bytes x parameters from each replica, one block at a time, plus one scalar a
          block; inside a replica one number a step.
Memory    anchor and outer momentum: 8 bytes a parameter, sharded like the parameters; on the CPU with `offload`.
Values    T = 600 s and at least 100 steps of all replicas are the published code's; the rest is EDiT's.
Departs   as EDiT; also, time is kept in float64 (the published code's float32 ticks every 128 s), weights by steps count
          the round's steps (there, all since the start), and the last rounds are shortened to end on the run's tokens.
"""

PAPER = "arXiv 2412.07210"
PRESET = {
    "warmup_steps": 1000,
    "period": {"kind": "seconds", "every": 600.0, "min_steps": 100},
    "outer": {"kind": "nesterov", "lr": 0.8, "momentum": 0.85},
    "reduction": {
        "kind": "edit_penalty",
        "z": 3.0,
        "ema": 0.02,
        "min_rounds": 10,
        "temperature": 1.0,
        "clip": 10.0,
        "step_weight": 0.0,
    },
    "schedule": "layerwise",
}
