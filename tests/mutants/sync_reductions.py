"""Mistakes in llmtrain/sync/reductions."""

TABLES = {
    "llmtrain/sync/reductions/edit_penalty.py": r"""
    seen by SCENARIOS
        penalty: statistics of the blocks of another fragment change
          -             whole[:, list(blocks)] = columns
          +             whole[:, : len(blocks)] = columns
        penalty: one round more before anomalies are sought
          - self.norms.count >= self.section.min_rounds
          + self.norms.count > self.section.min_rounds
        penalty: anomalous norms enter the running moments
          -         include = ~anomalous
          +         include = scaled_norms.isfinite()
        penalty: an excluded norm enters as it is
          - torch.where(anomalous, torch.minimum(scaled_norms, self.norms.mean + reach), scaled_norms)
          + scaled_norms
        penalty: every replica counts alike, whatever steps it made
          - share = share / share.sum(0).clamp(min=1)
          + share = share / len(share)
        penalty: anomalous replicas keep their softmax weight
          - logits = (-norms / self.section.temperature).masked_fill(anomalous, -torch.inf)
          + logits = -norms / self.section.temperature
        penalty: clipping also scales small updates up
          - return (target_norm / (squared_norm.sqrt() + EPSILON)).clamp(max=1)
          + return target_norm / (squared_norm.sqrt() + EPSILON)
    seen by distributed/test_message.py
        penalty: rounded means are taken to be no longer than what was sent
          - * clip) | self.is_rounded
          + * clip)
    seen by unit/test_edit_penalty.py
        penalty: no mean is measured below twice the clip
          - may_clip = (longest > CLIP_MARGIN * clip) | self.is_rounded
          + may_clip = (longest > 2 * clip) | self.is_rounded
        penalty: norms of 0 are remembered
          - include = scaled_norms.isfinite() & (scaled_norms > 0)
          + include = scaled_norms.isfinite()
        penalty: norms that never varied are judged
          - tested &= self.norms.variance > (EPSILON * self.norms.mean) ** 2
          + pass
        penalty: rounds in a row are not in the checkpoint
          - self.excluded = torch.tensor(state["excluded"])
          + pass
        penalty: rounds in a row never end
          - torch.where(anomalous, self.excluded + 1, 0)
          + self.excluded + anomalous.long()
    seen by unit/test_edit_penalty.py, SCENARIOS
        penalty: an excluded norm enters no farther in later rounds in a row
          - torch.exp2((self.excluded - 1).double())
          + 1.0
        penalty: norms are not divided by the learning rates
          - scaled_norms = norms / torch.where(lr_sums > 0, lr_sums, 1.0)[:, None]
          + scaled_norms = norms
        penalty: the norm of a short round is judged like that of a long one
          - lr_sums, 1.0)[:, None] * self._shortness(steps)
          + lr_sums, 1.0)[:, None]
    seen by distributed/test_methods_oracle.py
        penalty: what mixing leaves is judged as if it shrank with the steps
          - return ratio if self.is_mixed else ratio.sqrt()
          + return ratio.sqrt()
    seen by unit/test_reshard.py
        penalty: usual numbers of steps are not in the checkpoint
          - self.steps.load_state_dict(state["steps"])
          + pass
    seen by distributed/test_sync_oracle.py
        penalty: a block that is always excluded does not end the run in time
          - if limit is not None and longest >= limit:
          + if limit is not None and longest > limit:
    """,
    "llmtrain/sync/reductions/weighted_means.py": r"""
    seen by distributed/test_weighted_means.py
        tokens: work is tokens alone
          - done.tokens**2 / max(done.steps, 1)
          + done.tokens
        radial: the mean is not lengthened
          - (target_norm / squared_norm.sqrt())
          + (1.0 + 0 * squared_norm)
    seen by unit/test_weighted_means.py
        tokens: equal work is not exactly equal
          - relative = work / work.max()
          + relative = work * 0.1
        tokens: nobody counts in a round without steps
          - work = torch.ones_like(work)
          + pass
        radial: long pseudo-gradients turn the direction more
          - mean_norms / torch.where(moved, norms, 1.0) / moved
          + 1.0 / moved
        radial: replicas that have not moved are no part of the mean norm
          - / counted.sum(0).clamp(min=1)
          -
          + / (norms > 0).sum(0).clamp(min=1)
          +
        radial: directions that cancel are lengthened without a bound
          - .clamp(max=self.replicas)
        median: the lower one of two
          - (middle[0] + middle[1]) / 2
          + middle[0]
        median: replicas left out count in the divisor
          - 1.0) / (last + 1)
          + 1.0) / len(norms)
    """,
}
