"""All sections of a recipe except `data` and `sync`, which are in files of their own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat

from llmtrain.config.data import DataSection
from llmtrain.config.section import Count, CountOrZero, DecayRate, FileName, Fraction, PathText, Section, expand_name
from llmtrain.config.sync import SyncSection


class RunSection(Section):
    """Name, directory and seed of a run, and its reaction to failures."""

    name: FileName
    """Name of the run's directory below `out_dir`. The default is the file name of the recipe."""
    out_dir: PathText = "runs"
    """Parent folder of run directories."""
    seed: NonNegativeInt = 1234
    """The only seed. Initialization, data order and every other random choice derive their own seeds from it by name."""
    timeout_seconds: Annotated[float, Field(gt=0, le=1e8)] = 600
    """Maximum time that a collective waits for its peers; after that, the run fails. It must exceed the time between the arrival of
    the fastest and of the slowest replica at the end of a round. With gloo between replicas, it must also exceed the duration of a
    part of a message: 1 MB of a mean in fp32, but a block's whole message in the rounded formats. With NCCL between replicas, add
    the duration of a whole synchronization: the host starts the messages of all blocks at once, and NCCL's clock starts then."""
    restarts: CountOrZero = 2
    """Maximum number of restarts by `launch/train.sh` after a rank fails, or after a node is lost with
    `on_replica_loss=continue`. All ranks on all nodes restart from the last checkpoint."""
    on_replica_loss: Literal["stop", "continue"] = "stop"
    """Reaction to the loss of a node: `stop` ends the run on the other nodes; `continue` restarts it on them with fewer replicas, and
    with the largest batch up to `train.global_batch` that these can share; this needs node 0. Without effect under `slurm.sbatch`."""


class ModelSection(Section):
    """Causal language model of transformers, trained from random initialization or from existing weights."""

    type: str = "llama"
    """`model_type` of a causal language model of transformers that is decoder-only and dense (`llama`, `gpt_neo`, ...). A mixture of
    experts is refused."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the model's transformers config (`hidden_size`, `num_hidden_layers`, ...), with the names of transformers 5.
    The base of rotary positions is `rope_parameters: {rope_type: default, rope_theta: 10000.0}`."""
    from_config: str | None = None
    """Name or folder of a transformers config, of which `config` overrides single values. No weights are loaded.
    A run records the config's values."""
    from_weights: str | None = None
    """Weights that the run starts from: a run, one of its checkpoints, an export, or a folder or hub name with safetensors files.
    Without `config` and `from_config`, the architecture is also theirs. `null`: random initialization."""


class TrainSection(Section):
    """Length of training, and batch sizes.

    global_batch = micro_batch x accumulation x replicas x shards, in sequences. The number of accumulated micro-batches follows from
    the other four numbers. All replicas together read one global batch per step, so after the same number of steps, all methods have
    read the same tokens. The exception is PALSGD, whose pulls read none.
    """

    steps: Count | None = None
    """Number of optimizer steps. Exactly one of `steps` and `tokens` is given."""
    tokens: Count | None = None
    """Training tokens of all replicas, rounded down to whole steps; a step that is a pull (`sync.pull`) counts, though it reads none."""
    sequence_length: Count = 512
    """Tokens that a sequence predicts."""
    global_batch: Count = 32
    """Sequences per step, over all replicas."""
    micro_batch: Count = 8
    """Sequences per forward pass of a rank."""
    batch_shares: tuple[Count, ...] = ()
    """Share of each replica in the global batch, relative to the others: with `[2, 1]`, the first of two replicas reads two of three
    sequences. So replicas of unequal speed can take equally long for a step. `[]`: equal shares."""
    document_mask: bool = False
    """Restrict attention to the token's own document and the separator before it, and restart positions there; `false`: a token
    attends to all earlier tokens of its sequence. With the attention implementations of transformers, each sequence needs a mask
    of sequence_length squared."""
    deterministic: bool = False
    """Use only deterministic kernels, which are slower on GPUs. On CPUs all kernels are deterministic."""
    gc_every: Count | None = 50
    """Steps between garbage collections, which run on all ranks at the same step, so that ranks do not wait for each other in
    turn; `null`: Python decides."""

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence_length

    @property
    def total_steps(self) -> int:
        return self.steps if self.steps is not None else (self.tokens or 0) // self.tokens_per_step


class MuonSection(Section):
    """Muon, which updates matrices of the layers with `optim.kind=muon`. Embeddings, the head and vectors use AdamW."""

    momentum: DecayRate = 0.95
    """Decay rate of the momentum (Nesterov's)."""
    iterations: Count = 5
    """Newton-Schulz iterations per step."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of the learning rate for a matrix: `match_rms_adamw`, 0.2 sqrt(larger dimension), makes updates as large as AdamW's,
    so that learning rates and decay tuned for AdamW fit; `original` is sqrt(rows / columns), at least 1, for rates around 0.02."""
    adamw_lr_ratio: PositiveFloat = 1.0
    """Learning rate of the parameters that use AdamW, divided by `optim.lr`."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of the iterations: `bf16`, as published, `fp32`, or `auto`, bf16 on GPUs and fp32 on CPUs, most of which multiply bf16
    slowly. With `parallel.precision=fp64` it is fp64."""


class OptimSection(Section):
    """Inner optimizer and gradient clipping."""

    kind: Literal["adamw", "muon", "sgd"] = "adamw"
    """Inner optimizer. `muon` orthogonalizes the updates of matrices and needs fsdp2; `sync.method=muloco` chooses it. `sgd` has no
    momentum and serves checks against theory."""
    muon: MuonSection = Field(default_factory=MuonSection)
    """Choices of `muon`."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay of matrices. Vectors (norms, biases) are not decayed."""
    clip_norm: PositiveFloat | None = 1.0
    """Maximum gradient norm, over the whole model of a replica; `null`: no clipping."""
    nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """Reaction to a non-finite gradient: `stop` ends the run; `skip` skips and counts that step of the replica; `rollback` also
    resets the replica to its anchor, the parameters of the last synchronization. `rollback`, and `skip` with Muon, SGD or
    `sync.reduction=token_weighted`, wait for the device once per step. `skip` and `rollback` need FSDP2."""


class LRScheduleSection(Section):
    """Learning-rate schedule: linear warm-up, then the given shape."""

    kind: Literal["cosine", "linear", "constant", "step", "wsd"] = "cosine"
    """Shape after the warm-up. With `step`, the peak is multiplied by `decay_factor` once for each passed point of `decay_at`. With
    `wsd` (warmup-stable-decay, arXiv 2404.06395), the peak is kept until a decay at the end of the run."""
    warmup_steps: CountOrZero = 0
    """Steps of linear warm-up from 0."""
    final_ratio: Fraction = 0.1
    """Final learning rate, as a fraction of the peak (cosine, linear and wsd)."""
    decay_at: tuple[Fraction, ...] = (0.5, 0.75)
    """Fractions of the run after which the learning rate drops (step)."""
    decay_factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Factor of each drop (step)."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Fraction of the run's steps that the decay takes (wsd)."""
    decay_shape: Literal["linear", "1-sqrt"] = "linear"
    """Shape of the decay (wsd): `linear`, or `1-sqrt`, which falls faster at first and led to lower losses in arXiv 2405.18392.
    (That of arXiv 2404.06395 is exponential.)"""


class CpuMeshSection(Section):
    """Mesh on machines without a GPU, where the number of ranks does not follow from the number of devices."""

    replicas: Count
    """Number of replicas."""
    shards: Count
    """Number of ranks per replica."""


class VirtualClockSection(Section):
    """Speeds of replicas that take turns in one process. A-EDiT and WAGMA depend on which replica is ahead. On this clock, steps
    take the given time, and messages and PALSGD's pulls take none, so a run can be repeated. `perf/virtual_seconds` is the time
    that the run would take. If a run is continued within a round of WAGMA, the round's averages continue with all replicas at the
    same time."""

    step_seconds: tuple[PositiveFloat, ...]
    """Seconds that a training step takes, one number per replica."""
    random_delay: Annotated[float, Field(ge=0)] = 0.0
    """Seconds by which one replica, drawn anew for every step, is late."""


class ParallelSection(Section):
    """Mesh of ranks: `replicas` copies of the model, each sharded over `shards` ranks."""

    engine: Literal["fsdp2", "zero"] = "fsdp2"
    """Engine inside a replica: torch's FSDP2, or DeepSpeed ZeRO. With `fsdp2`, a replica on a single device is trained without
    sharding."""
    zero_stage: Literal[1, 2, 3] = 3
    """ZeRO stage: 1 shards the optimizer state, 2 also the gradients, 3 also the parameters. Layer-wise synchronization overlaps
    with the forward pass in stage 3; in stages 1 and 2 all blocks synchronize at the start of the step."""
    zero_offload: bool = False
    """Keep ZeRO's master parameters and optimizer state in CPU memory, and run the optimizer there."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """DeepSpeed configuration, merged over the generated one, for options that no other key sets."""
    replicas: Count | Literal["auto"] = "auto"
    """Copies of the model, with the slow network between them. `auto`: one per node; on a single node, as many as fit in memory."""
    shards: Count | Literal["auto"] = "auto"
    """Ranks per replica, with the fast network between them. `auto`: all ranks of a node, or on a single node with
    `replicas: auto`, as few as the model fits in."""
    in_process: bool = False
    """Train all replicas in one process, on one device, in turns; needs `replicas`. For comparing methods on a laptop or a single
    GPU. The results are those of one process per replica; in fp32 sums over more than two replicas, the order of addition differs
    (at most 1e-14 in tests in fp64)."""
    virtual_clock: VirtualClockSection | None = None
    """With `in_process`, how long each replica's steps take. `null`: unknown, so methods that depend on it are refused."""
    on_cpu: CpuMeshSection | None = None
    """Mesh that `auto` stands for on machines without a GPU. launch/train.sh starts that many ranks; with any other number of ranks,
    this key has no effect."""
    precision: Literal["bf16", "fp32", "fp64"] = "bf16"
    """Precision of forward and backward passes. Master parameters and optimizer state are fp32; `fp64` is everything in fp64, for
    verification."""
    compile: bool = False
    """Apply torch.compile to each layer on its own, to the loss's computation on logits, and to the rounding of messages."""
    activation_checkpointing: bool | Literal["selective"] = False
    """Recompute each layer in the backward pass instead of keeping its activations; `selective`: keep the results of matrix
    products and attention, which are expensive, and recompute the rest."""
    reshard_after_forward: bool | Literal["auto"] = "auto"
    """With `fsdp2` and several shards, free each block's gathered parameters after its forward pass, and gather them again in the
    backward pass. `false` saves the second gathering, but needs memory for all parameters in the precision of the forward pass.
    `auto`: `false` where these parameters take at most 256 MiB or a tenth of the estimated memory."""
    loss_chunk: Count = 1024
    """Positions per chunk of the loss. Limits the memory of logits to loss_chunk x vocabulary."""
    loss_kernel: Literal["torch", "liger"] = "torch"
    """Kernel of head and loss: `torch`, or on GPUs `liger`, if liger-kernel is installed. `liger` chooses its own chunks."""
    replica_backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Backend of the messages between replicas; `auto`: nccl on GPUs; gloo on CPUs, with `zero_offload`, and where
    replicas share a GPU."""
    connections: Count | Literal["auto"] = "auto"
    """With gloo, connections from each rank to each of its peers in other replicas, over which messages in fp32 are spread.
    `auto`: 4 between hosts whose round trip takes 10 ms or more, otherwise 1. Sums over more than two replicas differ by rounding
    errors from those with another number of connections."""
    replica_network: str | None = None
    """Network interface of the messages between replicas (`eth0`); from a list (`eth0,ens5`) each host takes the first that it
    has. `null`: GLOO_SOCKET_IFNAME, or else the interface that reaches the other hosts; on GPUs, nccl's own choice."""
    shard_network: str | None = None
    """Network interface of the messages within a replica. nccl has one setting per process: `replica_network` wins if nccl also
    carries the messages between replicas."""
    allow_unencrypted: bool = False
    """Do not warn when messages between nodes cross a public network, where nothing encrypts them."""
    shard_across_nodes: bool = False
    """Allow replicas to span nodes. With `shards: auto`, a replica spans as many nodes as it needs to fit in memory."""

    @property
    def ranks_per_process(self) -> int:
        """Return the number of ranks that are threads of one process: all replicas with `in_process`, otherwise 1."""
        return self.replicas if self.in_process and self.replicas != "auto" else 1

    @property
    def given_on_cpu(self) -> list[int]:
        """Return the numbers of replicas and shards that are known on a machine without a GPU, where `on_cpu` stands for
        `auto`."""
        if self.in_process:
            return [] if self.replicas == "auto" else [self.replicas, 1]
        replicas, shards = self.replicas, self.shards
        if self.on_cpu is not None:
            replicas = self.on_cpu.replicas if replicas == "auto" else replicas
            shards = self.on_cpu.shards if shards == "auto" else shards
        return [size for size in (replicas, shards) if size != "auto"]


class CheckpointSection(Section):
    """Checkpoints of the complete state: their interval and retention."""

    every: Count | None = 1000
    """Steps between checkpoints; `null`: only after the last step. With timed rounds, checkpoints are written at
    exchanges of step counts."""
    keep: Count = 3
    """Number of the newest checkpoints to keep."""
    keep_every: Count | None = None
    """Interval of checkpoints that are kept for good, in steps: the first one at or after each multiple. `null`: only the newest
    are kept."""
    keep_best: bool = True
    """Also keep the checkpoint with the lowest validation loss, of those whose step was validated."""
    background: bool = True
    """Write checkpoints from a copy in host memory while training continues; `false`: training waits, and the copy is never
    larger than one tensor (with `sync.offload`: than anchors and outer momenta; under ZeRO on GPUs: than the complete state)."""
    mirror: PathText | None = None
    """Folder or fsspec URL (`s3://bucket/runs`) to which complete checkpoints are copied while training continues. A run that
    resumes fetches them if they are newer than those in its run directory."""


class TraceSection(Section):
    """Steps whose timeline every rank records (trace/rank-*.jsonl), for the reports of `compare`."""

    first: Count = 1
    """First recorded step."""
    steps: Count = 50
    """Number of recorded steps."""


class ProfileSection(Section):
    """Steps that torch.profiler records, as Chrome traces (profile/rank-*.json.gz)."""

    first: Annotated[int, Field(ge=3)] = 10
    """First recorded step. The step before it warms up the profiler."""
    steps: Count = 3
    """Number of recorded steps. A trace takes several megabytes per step."""
    ranks: tuple[NonNegativeInt, ...] = (0,)
    """Ranks that record."""

    @property
    def last(self) -> int:
        """Return the last step that is recorded."""
        return self.first + self.steps - 1


class WandbSection(Section):
    """Logging to Weights & Biases, in addition to metrics.jsonl. Needs the package wandb."""

    project: str
    """Project of the run, in which its name is `run.name`."""
    entity: str | None = None
    """User or team; `null`: the default of wandb."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to the run directory only, for a later `wandb sync`."""


class LogSection(Section):
    """Metrics, traces and profiles of a run."""

    every: Count = 10
    """Steps between lines of metrics."""
    tensorboard: bool = True
    """Write the metrics as TensorBoard events, in addition to metrics.jsonl."""
    wandb: WandbSection | None = None
    """Send the metrics to Weights & Biases, `{project, entity, mode}`; `null`: do not."""
    trace: TraceSection | None = None
    """Record the timeline of some steps, `{first, steps}`; `null`: none."""
    profile: ProfileSection | None = None
    """Record some steps with torch.profiler, `{first, steps, ranks}`; `null`: none."""


class SuiteSection(Section):
    """Suite of benchmarks that a separate process runs on checkpoints. Training never waits for it (eval/README.md). Each
    evaluation leaves an export in export/, 4 bytes per parameter."""

    name: str
    """A suite of the package (`small`, `offline`, `edit_paper`, `tinystories`) or a YAML file."""
    every: Count = 1
    """Checkpoints between evaluations. The last checkpoint is always evaluated."""
    limit: Count | None = 200
    """Maximum number of documents per task; `null`: the limit of the suite."""
    data_dir: PathText | None = None
    """Folder of local data, for suites like `offline` that read it."""
    device: str = "cpu"
    """Device of the evaluation. On a GPU it shares memory with training."""
    threads: Count = 4
    """Number of CPU threads, at the lowest priority."""
    wait_seconds: PositiveFloat = 1800
    """Maximum wait for the last evaluation at the end of the run, after which it is stopped."""


class EvalSection(Section):
    """Validation of the mean of the replicas (with `gpa`, of the anchor). It works on a copy and never changes the run."""

    every: Count | None = 1000
    """Steps between validations; `null`: only after the last step."""
    tokens: Count = 1_000_000
    """Number of validation tokens, at most those of the source. Every validation uses the same ones."""
    sets: dict[FileName, str] = Field(default_factory=dict)
    """Additional validation texts by name, each a file or folder (`{news: news.txt}`), read like `data.validation`."""
    suite: Annotated[SuiteSection | None, BeforeValidator(expand_name)] = None
    """Benchmarks on checkpoints while training continues; `NAME` is short for `{name: NAME}`, and `null`: none."""
    sample_prompt: str | None = None
    """Prompt that the model continues at each validation after the first step (`samples.txt`). If this takes more than a few seconds
    (parameters x tokens above 5e9), the model continues it only at the end. `""`: an empty prompt; `null`: no sample."""
    sample_tokens: Count = 120
    """Length of the sample, in tokens."""


class Recipe(Section):
    """A complete recipe."""

    run: RunSection
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    train: TrainSection = Field(default_factory=TrainSection)
    optim: OptimSection = Field(default_factory=OptimSection)
    schedule: LRScheduleSection = Field(default_factory=LRScheduleSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    sync: SyncSection = Field(default_factory=SyncSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    log: LogSection = Field(default_factory=LogSection)
    eval: EvalSection = Field(default_factory=EvalSection)

    @property
    def mirror_url(self) -> str | None:
        """Location of the run's mirror, or None if it has none."""
        base = self.checkpoint.mirror
        return None if base is None else f"{base.rstrip('/')}/{self.run.name}"
