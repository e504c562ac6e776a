"""MuLoCo (Thérien et al., arXiv 2505.23725): DiLoCo with Muon as its inner optimizer, so that replicas drift apart less within a round.

Rule      DiLoCo's, with D from steps of Muon on the matrices of the layers, and of AdamW on everything else
          (`llmtrain/parallel/muon.py`). Each replica keeps its momenta.
Traffic   as DiLoCo: per round, 2 (N-1)/N x 4 bytes x parameters from each replica. Orthogonalization stays within a replica.
Memory    as DiLoCo, and one momentum instead of AdamW's two for matrices of layers: 4 bytes per value less.
Defaults  H = 30, Muon's momentum 0.9, outer lr 0.8 and momentum 0.8 are in the range of the published settings for several
          replicas (lr 0.8 to 1.0, momentum 0.8 to 0.9). Several replicas gain from a momentum smaller than DiLoCo's 0.9.
Differs   Muon's learning rate is adjusted to AdamW's size of updates (`optim.muon.adjust_lr`), so that one `optim.lr` serves all
          parameters. The study's trials chose six times the rate of AdamW; the published learning rates, 0.016 to 0.06, are for
          `adjust_lr=original`. 2- and 4-bit messages with error feedback are a choice of `sync.wire`. The paper's tables for each
          number of replicas were not available to us.
"""

PAPER = "arXiv 2505.23725"
CHOOSE_WHEN = "you can switch to Muon"
PRESET = {
    "warmup_steps": 0,
    "period": {"kind": "steps", "every": 30},
    "outer": {"kind": "nesterov", "lr": 0.8, "momentum": 0.8},
    "reduction": "mean",
    "schedule": "blocking",
}
OPTIM = {"kind": "muon", "muon": {"momentum": 0.9}}
