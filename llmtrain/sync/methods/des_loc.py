"""DES-LOC (arXiv 2505.22549): Local SGD that also averages the inner optimizer's moments, slowly changing ones less often.

Rule      theta <- mean theta_n after every H local steps; v <- mean v_n, the second moments, after every sixth such round; and
          m <- mean m_n, the first moments, after every third.
Traffic   per round, 2 (N-1)/N x 4 bytes x parameters from each replica for the parameters, and a third and a sixth of that for
          the moments: 1.5 times Local SGD's.
Memory    no extra state: the mean replaces the parameters and the moments. Moments of three blocks are in flight at once.
Defaults  H = 32, first 3, second 6. The ratio of the periods is the paper's; its H was not available to us.
          With betas of 0.9 and 0.95, 3 and 19 % of a mean moment are left after 32 steps, so averaging moments has little effect;
          it has more with larger betas or shorter rounds.
Differs   moments that are due are averaged at the end of a round, while training waits, and in master precision whatever the wire
          and the schedule. A value whose second moment is 0 on a replica, as in the embedding of a token that it has not seen, gets
          a first moment of 0 there: AdamW would divide the mean of the other replicas' moments by its epsilon. With Muon, matrices
          have a first moment alone.
"""

PAPER = "arXiv 2505.22549"
CHOOSE_WHEN = "rounds are short, or betas near 1"
PRESET = {
    "warmup_steps": 0,
    "period": {"kind": "steps", "every": 32},
    "outer": {"kind": "average"},
    "reduction": "mean",
    "schedule": "blocking",
    "moments": {"first": 3, "second": 6},
}
