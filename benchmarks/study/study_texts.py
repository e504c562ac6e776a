"""Titles, columns and texts of the study's page."""

from __future__ import annotations

COLUMNS = (
    "method",
    "best trial",
    "loss",
    "± seeds",
    "to synchronous",
    "tokens to equal loss",
    "bits per byte",
    "rounds",
    "sent",
    "chosen",
)
SUMMARY = (
    "method",
    "loss ± seeds",
    "above synchronous",
    "tokens to equal loss",
    "bytes",
    "tokens/s at 0.1 / 1 / 10 / 100",
    "speed to its loss at 0.1 / 1 / 10 / 100",
)
README_COLUMNS = (
    "method",
    "loss above synchronous",
    "tokens to equal loss",
    "bytes",
    "speedup at 1 step",
    "at 10 steps",
    "at 100 steps (extrapolated)",
)
ALONE = "one replica's devices alone"
README_ROWS = {
    "synchronous-int8": "synchronous, int8 gradients",
    "diloco-auto, H = 10": "DiLoCo, `sync.outer=auto`, rounds of 10 steps",
    "qsr": "QSR",
    "diloco-auto": "DiLoCo, `sync.outer=auto`",
    "edit": "EDiT",
    "diloco": "DiLoCo",
    "streaming_diloco": "Streaming DiLoCo, int4",
    "local_sgd": "Local SGD",
    "sparseloco": "SparseLoCo",
    "muloco": "MuLoCo, beside synchronous with Muon",
    "edit-x4": "EDiT, four times the tokens",
    "diloco-x4": "DiLoCo, four times the tokens",
    "local_sgd-x4": "Local SGD, four times the tokens",
}
"""Rows of the table in README.md: what it calls them, by label."""
REACHED = (
    "method",
    "seeds",
    "steps",
    "tokens",
    "times as fast at 0.1 / 1 / 10 / 100",
)
REACHED_TEXT = """\
Which runs reach the final loss of synchronous training with AdamW (the mean over three seeds, after 780 steps), and when? No method
with AdamW and local steps from the beginning does with as many tokens (with 4 replicas and this batch). With four times the tokens
(`x4`, 3,120 steps) or with Muon, they reach it in the middle of their learning-rate schedule, by steps and tokens to that moment, and by
the predicted time of 780 steps of synchronous training divided by the time to that moment. *Seeds*: of how many the runs reach it; there
are no times unless all do:"""
CHANGES = (
    "DiLoCo",
    "batch",
    "tokens",
    "rounds",
    "loss ± seeds",
    "synchronous, same batch",
    "above it",
    "published fit",
)
CHANGES_TEXT = """\
The next table shows what changes DiLoCo's distance to synchronous training with the same batch and tokens. *published fit*: the fit of
arXiv 2503.09799 to models of 35 M parameters and more, extrapolated to this size. In that paper, both methods have their own best batch,
and training and validation use the same text:"""
TEXT_NAMES = {
    "": "",
    "tinystories": ", TinyStories",
    "mixture": ", Python and TinyStories mixed",
    "sites": ", Python and TinyStories at two sites",
}
"""Words for a cell's text, by its name."""
GAPS = "Gap against the number of rounds"
STEPS = "Tokens per second, by network"
SPEEDS = "Speed to its own final loss, by network"
HEATS = "DiLoCo with other outer settings"
UNEVEN = "Uneven replicas: losses and virtual times"
EVEN = "Where methods break even"
TRAINED = "Losses on the training text"
BY_SEED = "Differences to Local SGD, seed by seed"
FIRST = "With a warm-up of 5 % of the steps"
TITLES = {
    "main": "All methods, 4 replicas, H = 30",
    "gradients": "Synchronous training with rounded gradients",
    "together": "The first 8 % of the steps synchronous, 4 replicas, H = 30",
    "uneven": "Uneven replicas by a virtual clock, H = 30",
    "replicas": "Numbers of replicas, H = 30",
    "rounds": "Lengths of rounds, 4 replicas",
    "batch": "Other batches, 4 replicas, H = 30",
    "long": "Four times the tokens, 4 replicas, H = 30",
    "text": "TinyStories with the settings that were chosen on Python, 4 replicas, H = 30",
    "power": "QSR whose rounds grow with 1 / learning rate, not with its square, 4 replicas",
    "muon": "Muon inside, 8 replicas, H = 30",
    "sites": "Python and TinyStories, mixed or at two sites, with the settings that were chosen on Python, 4 replicas, H = 30",
    "auto": "DiLoCo with `sync.outer=auto` and the inner learning rate that trials chose, 4 replicas",
}
TEXT = """\
Llama with 0.32 M parameters on Python files, 6.4 M tokens, one epoch: what was decided before the first run is in
[PROTOCOL.md](../../study/PROTOCOL.md). Losses are of validation, in nats per token, of the replicas' mean at the end of a run.
`best trial` is the lowest of {trials} trials with about a quarter of the tokens; `loss` is the mean of {seeds} seeds with all
tokens and that trial's setting, and `± seeds` half of the distance between the lowest and the highest; it does not include the
noise of tuning, because trials compare settings with one seed. `to synchronous` compares with the synchronous runs of the same
number of replicas, batch and inner optimizer. `tokens to equal loss` is the share of the tokens with which synchronous training,
annealed on them, reaches the same loss (interpolated between the means of runs with {shares} of the tokens, all with the full run's
warm-up; the range is that of the method's seeds, beside the mean of synchronous training, and a loss below that mean counts as 100
%. The losses fall ever more slowly, so straight lines between three shares are up to 4 points too high, on TinyStories up to 5: by a
parabola, QSR's 65 % is 62 %, and WAGMA's 80 % is 77 %). `sent` is the sum of what all replicas send. Cells without a loss are not
complete; if a seed diverged, there is no mean."""
STEPS_TEXT = """\
How many times as many tokens per second as synchronous training a method makes, if sending the whole model once in fp32 takes as
long as this many steps. Predicted as by `llmtrain recipe show`, without latency. Its error was at most 3.5 points of utilization in
[measurements](../../../docs/network.md#how-exact-are-the-predictions) whose steps sleep, with messages of up to 21 steps; the
last column is extrapolated. With real steps on half a core per host, synchronous training used 50 % of the time where 67 % are predicted
([time_to_loss](../compare/README.md#results)), because sending needs the same core. Muon's own computation is included."""
SPEEDS_TEXT = """\
How many times as fast as synchronous training (fp32 gradients, the same batch) a method reaches the loss that it ends with: the
predicted duration of synchronous training divided by that of the method, times `tokens to equal loss`, with the range over its
seeds. Above 1, the method pays off. Each method has its own loss, so these numbers do not rank methods. Cells of the stages
`main`, `gradients`, `together`, `rounds`, `auto` and `long` have a row if they have 4 replicas and the usual batch, and their `tokens to
equal loss` is known and not below the smallest measured share. Rounds have 30 steps unless H is given, also where messages take longer
than that. The figure leaves out Muon, synchronous starts, other H and `sync.outer=auto`; its bands show the range over the seeds."""
UNEVEN_TEXT = """\
`half`: one of the four replicas has half the speed of the others. `random`: in each step, one of them takes two seconds and the
others one. Messages take no time, so these are the times of waiting for slow replicas alone. `time` is that of all tokens, to
that of synchronous training; `speed to its loss` is `tokens to equal loss` divided by it."""
EVEN_TEXT = """\
How many steps sending the whole model once in fp32 takes, where a method is predicted to reach its loss as fast as synchronous
training with gradients in this format; above that, the method is faster. *Below 0.1* and *above 100*: it is faster, or not, with all
message times in the range that was looked at. *No int8 run*: synchronous training with the method's inner optimizer (Muon) was not
run with int8 gradients. *Has its own wire*: the method's messages are rounded already. Methods have the wires of their runs: fp32,
but for Streaming DiLoCo (int4), SparseLoCo (topk) and synchronous training. In the last column, they would be in int8, at the same
loss, which was measured for DiLoCo alone. Nor were int8 gradients with four times the tokens (`x4`): the row assumes that they raise
the loss as little there."""
TRAINED_TEXT = """\
The last training loss is the mean of the last log interval, on text that is read once, with each replica's own parameters. Losses of all
other tables are of the replicas' mean, on packages that are not in the training text."""
HEATS_TEXT = """\
Final losses with seed {seed}, 4 replicas, H = 30, all tokens and the inner learning rate that the trials chose. In the study,
nothing was chosen by them; `sync.outer=auto` follows the lowest."""
FIRST_TEXT = """\
These runs were made first, as the protocol said then. Warm-up is 10 steps in trials and 39 in final runs. Later probes showed
that this is far too short, and that trials chose learning rates by how well they stand it
([PROTOCOL.md](../../study/PROTOCOL.md), amendments). Cells without a loss for every seed have no row. All records are in
[short_warmup.jsonl](short_warmup.jsonl)."""
ELASTIC = "Replicas that join or leave, each with its part of the batch"
ELASTIC_COLUMNS = (
    "replicas",
    "method",
    *(f"loss after stage {stage}" for stage in (1, 2, 3, 4)),
    "± seeds",
    "to synchronous",
    "sent",
)
ELASTIC_TEXT = """\
Four stages of 180 steps with 16 sequences per replica and step: the batch grows from 16 to 128 sequences, or shrinks. Means of three
seeds, from [elastic.jsonl](elastic.jsonl) (`python benchmarks/study/study_elastic.py`). Stopped and continued at the end of every
stage, by a signal and the same command with other `parallel.replicas` and `train.global_batch`."""
BENCHMARKS = "Benchmarks of the models of TinyStories"
BENCHMARKS_TEXT = """\
Medians of three seeds and their range, from [benchmarks.jsonl](benchmarks.jsonl) (`python benchmarks/study/study_benchmarks.py`), on
six tasks of the suite `offline` with at most 500 documents each (BLiMP: per paradigm); answers of its other two, HellaSwag and PIQA,
do not fit into the models' 128 positions. *Better in 2 of 3*: with so many seeds, the paired test
against synchronous training with the same seed has p < 0.05."""
SITES = "Python and TinyStories: losses by text"
SITES_COLUMNS = ("method", "texts", "loss ± seeds", "to synchronous", "Python", "TinyStories")
SITES_TEXT = """\
Half of the sequences are of each text, in tokens of Python's tokenizer. *mixture*: every replica reads both texts. *sites*: two replicas
read Python and the other two TinyStories (`data.per_replica`). `loss` is the mean over the validation texts of both."""
SINGLE = "Single runs"
SINGLE_TEXT = """\
Probes, which answer questions about other runs ([results.md](../../../docs/results.md)). Nothing was chosen by them."""
FAULTS = "Faults of one of four replicas, and EDiT's penalty"
FAULTS_COLUMNS = ("fault", "penalty", "loss", "to the whole penalty without a fault", "excluded blocks")
FAULTS_TEXT = """EDiT with H = 10 and 60 rounds, one seed. In rounds 31 to 34, one replica has a fault. *bits*: once, a bit of one weight's
exponent flips, which makes the weight 65,536 times as large. *rate*: ten times the inner learning rate. *documents*: random
tokens. *gradients*: 1,000 times as large, before they are clipped. *all_rates*: all replicas have four times the inner learning
rate in the whole run. The model has three blocks; a block that is excluded in one round counts once."""
