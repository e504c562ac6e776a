"""WAGMA-SGD (Li et al., arXiv 2005.00124, TPDS 2021): averages within small changing groups, and nobody waits for them.

Rule      W' is a replica's model after its step. In step t the first replica to arrive activates all: a thread in every
          replica sums, over its group of S, each member's newest W'. Who was in the sum with this step's W' goes on from
          sum / S; who was late, and in it with an older one, from (sum + W') / (S + 1). After every H steps all
          replicas wait for each other and average. Groups are a butterfly's: bits (t log2 S + r) mod log2 N, r < log2 S,
          so that an update reaches everybody in log_S N steps, rounded up.
Traffic   2 (S-1)/S x 4 bytes x parameters from each replica in all steps of a round but the last, 2 (N-1)/N x 4 bytes in
          that one.
Memory    the last common model (the anchor), 4 bytes a parameter; on the CPU, copies of the newest models not yet sent
          (usually one, 4 bytes a parameter) and, for a late replica, one sum for every step it is behind.
Values    S = sqrt(N) and H = 10 (ImageNet; 8 elsewhere) are the paper's.
Departs   the group formula is the text's, since the printed algorithm and the published code skip bits; a late
          replica merges with 1/(S + 1) and an on-time one with 1/S (the published code always does the first); activation
          is a key in the job's store, not a message along a binomial tree; after a global average, that average is the
          newest model until the next step.
"""

PAPER = "arXiv 2005.00124"
PRESET = {
    "warmup_steps": 0,
    "period": {"kind": "steps", "every": 10},
    "outer": {"kind": "average"},
    "reduction": "mean",
    "schedule": {"kind": "wait_avoiding", "group_size": "auto"},
}
