"""WAGMA-SGD (Li et al., arXiv 2005.00124, TPDS 2021): averages within small, changing groups, without waiting for late replicas.

Rule      W' is the model of a replica after its step. The first replica to finish step t wakes a thread in every replica,
          which sums the newest W' of each member of its group of S. A replica whose W' of step t was in the sum continues
          from sum / S. A late replica, of which an older model was in the sum, continues from (sum + W') / (S + 1). After
          every H steps all replicas wait for each other and average. Groups follow a butterfly: members differ in bits
          (t log2 S + r) mod log2 N, r < log2 S, so that an update reaches every replica in ceil(log_S N) steps.
Traffic   2 (S-1)/S x 4 bytes x parameters from each replica in all steps of a round but the last, and 2 (N-1)/N x 4 bytes x
          parameters in the last.
Memory    the last common model (the anchor), 4 bytes per parameter; in CPU memory, copies of the newest models not yet
          sent (usually one, 4 bytes per parameter) and, for a late replica, one sum per step that it is behind.
Defaults  S = sqrt(N) and H = 10 (ImageNet; 8 elsewhere) are the paper's.
Differs   the group formula is that of the paper's text, because its printed algorithm and the published code skip bits; a
          late replica merges with 1/(S + 1) and one on time with 1/S (the published code always uses the first); the
          wake-up is a key in the job's store instead of a message along a binomial tree; after a global average, that
          average is the newest model until the next step.
"""

PAPER = "arXiv 2005.00124"
CHOOSE_WHEN = "the network is fast, but replicas are uneven"
PRESET = {
    "warmup_steps": 0,
    "period": {"kind": "steps", "every": 10},
    "outer": {"kind": "average"},
    "reduction": "mean",
    "schedule": {"kind": "wait_avoiding", "group_size": "auto"},
}
