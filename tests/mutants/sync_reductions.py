"""Mistakes in llmtrain/sync/reductions."""

TABLES = {
    "llmtrain/sync/reductions/edit_penalty.py": r"""
    seen by SCENARIOS
        penalty: statistics of another fragment's blocks change
          -             whole[:, list(blocks)] = columns
          +             whole[:, : len(blocks)] = columns
        penalty: anomalies are detected one round late
          - self.norms.count >= self.section.min_rounds
          + self.norms.count > self.section.min_rounds
        penalty: anomalous norms enter the running moments
          -         include = ~anomalous
          +         include = scaled_norms.isfinite()
        penalty: an excluded norm enters without a bound
          - torch.where(anomalous, torch.minimum(scaled_norms, self.norms.mean + reach), scaled_norms)
          + scaled_norms
        penalty: every replica has the same weight regardless of its steps
          - share = share / share.sum(0).clamp(min=1)
          + share = share / len(share)
        penalty: anomalous replicas keep their softmax weight
          - logits = (-norms / self.section.temperature).masked_fill(anomalous, -torch.inf)
          + logits = -norms / self.section.temperature
        penalty: clipping also scales small updates up
          - return (target_norm / (squared_norm.sqrt() + EPSILON)).clamp(max=1)
          + return target_norm / (squared_norm.sqrt() + EPSILON)
    seen by distributed/test_message.py
        penalty: rounded means count as no longer than their messages
          - * clip) | self.is_rounded
          + * clip)
    seen by unit/test_edit_penalty.py
        penalty: a mean below twice the clip is not measured
          - may_clip = (longest > CLIP_MARGIN * clip) | self.is_rounded
          + may_clip = (longest > 2 * clip) | self.is_rounded
        penalty: norms of 0 enter the running moments
          - include = scaled_norms.isfinite() & (scaled_norms > 0)
          + include = scaled_norms.isfinite()
        penalty: constant norms are tested for anomalies
          - tested &= self.norms.variance > (EPSILON * self.norms.mean) ** 2
          + pass
        penalty: the excluded rounds in a row are not in the checkpoint
          - self.excluded = torch.tensor(state["excluded"], device="cpu")
          + pass
        penalty: the count of excluded rounds in a row never returns to 0
          - torch.where(anomalous, self.excluded + 1, 0)
          + self.excluded + anomalous.long()
    seen by unit/test_edit_penalty.py, SCENARIOS
        penalty: the bound on an excluded norm does not grow over rounds in a row
          - torch.exp2((self.excluded - 1).double())
          + 1.0
        penalty: norms are not divided by the learning rates
          - scaled_norms = norms / torch.where(lr_sums > 0, lr_sums, 1.0)[:, None]
          + scaled_norms = norms
        penalty: the norm of a short round is judged like that of a long one
          - lr_sums, 1.0)[:, None] * self._shortness(steps)
          + lr_sums, 1.0)[:, None]
    seen by distributed/test_methods_oracle.py
        penalty: with mixing, norms are scaled as without
          - return ratio if self.is_mixed else ratio.sqrt()
          + return ratio.sqrt()
    seen by unit/test_reshard.py
        penalty: the usual numbers of steps are not in the checkpoint
          - self.steps.load_state_dict(state["steps"])
          + pass
    seen by distributed/test_sync_oracle.py
        penalty: a block that is always excluded ends the run a round late
          - if limit is not None and longest >= limit:
          + if limit is not None and longest > limit:
    """,
    "llmtrain/sync/reductions/weighted_means.py": r"""
    seen by distributed/test_weighted_means.py
        tokens: work depends on tokens alone
          - done.tokens**2 / max(done.steps, 1)
          + done.tokens
        radial: the mean is not rescaled
          - (target_norm / squared_norm.sqrt())
          + (1.0 + 0 * squared_norm)
    seen by unit/test_weighted_means.py
        tokens: equal work does not have weights of exactly 1
          - relative = work / work.max()
          + relative = work * 0.1
        tokens: no replica counts in a round without steps
          - work = torch.ones_like(work)
          + pass
        radial: long pseudo-gradients have more influence on the direction
          - mean_norms / torch.where(moved, norms, 1.0) / moved
          + 1.0 / moved
        radial: replicas that have not moved are left out of the mean norm
          - / counted.sum(0).clamp(min=1)
          -
          + / (norms > 0).sum(0).clamp(min=1)
          +
        radial: directions that cancel are rescaled without a bound
          - .clamp(max=self.replicas)
        median: the lower of two middle values counts
          - (middle[0] + middle[1]) / 2
          + middle[0]
        median: excluded replicas count in the divisor
          - 1.0) / (last + 1)
          + 1.0) / len(norms)
    """,
}
