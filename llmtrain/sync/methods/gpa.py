"""GPA (generalized primal averaging, arXiv 2512.17131): DiLoCo's outer step on one replica, smoothed over every step.

Rule      after every step of the inner optimizer from y to theta: z <- z + (theta - y); x <- decay x + (1 - decay) z;
          y <- share x + (1 - share) z; theta <- y. All three start equal. The model is x, which is validated and exported, and
          with which the run ends.
Traffic   none with one replica. With several, 2 (N-1)/N x 4 bytes x parameters from each of them per round of H steps.
Memory    x and z - x: 8 bytes per parameter, sharded like the parameters. A dedicated optimizer would need 4, because x follows
          from y and z.
Defaults  H = 1, share 0.7, decay 0.9967: the paper's equivalent of DiLoCo with H = 32. A run should have several times
          1 / (1 - decay) steps: 0.9967 averages over 300.
Differs   weight decay is AdamW's, at y. Checkpoints within a run store y as the replica's weights and x as the anchor. At the end
          of a run theta <- x and z <- x. Several replicas are possible, which the paper has not validated.
"""

PAPER = "arXiv 2512.17131"
CHOOSE_WHEN = "you have one replica and want no rounds"
FOR_ONE_REPLICA = True
PRESET = {
    "warmup_steps": 0,
    "period": {"kind": "steps", "every": 1},
    "outer": {"kind": "gpa", "decay": 0.9967, "share": 0.7},
    "reduction": "mean",
    "schedule": "blocking",
}
