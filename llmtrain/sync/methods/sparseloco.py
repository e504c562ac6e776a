"""SparseLoCo (Sarfi et al., arXiv 2508.15706): DiLoCo that sends only the largest values of the pseudo-gradient, with error feedback.

Rule      e_n <- decay e_n + (anchor - theta_n) after H local steps; s_n = the largest values of e_n in each chunk, rounded to
          2 bits; e_n <- e_n - s_n; anchor <- anchor - lr (1/N) sum_n s_n; theta_n <- anchor. There is no outer momentum: the
          unsent values are the memory.
Traffic   per round, (N-1) x 120/4096 bytes x parameters from each replica: every replica sends to all others. With N = 4 that is
          1.5 % of a round in fp32, with N = 16 6 %.
Memory    anchor and unsent values: 8 bytes per parameter, sharded like the parameters; the anchor in CPU memory with
          `sync.offload`.
Defaults  H = 15, 64 of 4096 values, decay 0.95, outer lr 1: published for 512 M parameters and 8 workers. The paper's H
          goes up to 250, and longer rounds send more values.
Differs   chunks are of consecutive values of a rank's part of a block (in the paper, of 64 x 64 values of a matrix), the two
          magnitudes of a chunk are the means of the larger and smaller half of what it sends, and each takes 4 bytes
          (`llmtrain/parallel/sparse_format.py`). Unsent values are stored multiplied by 1/N, which does not change
          the result. The published code divides each value by the number of replicas that sent it; here, as in the paper, by N.
          One replica alone sends nothing and leaves nothing out.
"""

PAPER = "arXiv 2508.15706"
CHOOSE_WHEN = "every byte counts and replicas are few"
PRESET = {
    "warmup_steps": 0,
    "period": {"kind": "steps", "every": 15},
    "outer": {"kind": "sgd", "lr": 1.0},
    "reduction": "mean",
    "schedule": "blocking",
    "wire": {"kind": "topk", "keep": 64, "error_feedback": True, "feedback_decay": 0.95},
}
