"""A whole recipe: every section but `sync`, which has a file of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from llmtrain.config.section import Count, DecayRate, Fraction, Section
from llmtrain.config.sync import SyncSection


class RunSection(Section):
    """The name of a run and what all its randomness comes from."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Directory of the run below `out_dir`; the recipe's file name when left out."""
    out_dir: str = "runs"
    """Where run directories are made."""
    seed: NonNegativeInt = 1234
    """The one seed. Initialization, data order and every random choice derive from it by name."""
    timeout_seconds: PositiveFloat = 600
    """How long a collective may wait for a peer before the run fails. Longer than the slowest replica takes for a round more
    than the fastest."""
    restarts: NonNegativeInt = 2
    """How often `launch/train.sh` starts the ranks again, on all nodes, from the last checkpoint, after one has failed."""
    on_replica_loss: Literal["stop", "continue"] = "stop"
    """When a whole node is gone: `stop` ends the run on the others; `continue` restarts it on those that are left, with fewer
    replicas. Needs node 0, and a `global_batch` that the replicas left can share."""


class ModelSection(Section):
    """The decoder-only transformers model to train, from random initialization."""

    type: str = "llama"
    """`model_type` of a transformers causal language model (`llama`, `gpt_neo`, ...)."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that model's transformers config (`hidden_size`, `num_hidden_layers`, ...), by transformers 5's names:
    the base of rotary positions is `rope_parameters: {rope_type: default, rope_theta: 10000.0}`."""
    from_config: str | None = None
    """Name or folder of a transformers config to start from; `config` then changes single values. Weights are not loaded."""


class DataSection(Section):
    """The text, its tokenizer, and where token shards are kept."""

    source: str = "stdlib"
    """`stdlib`, a `.txt`/`.jsonl`/`.parquet` file, a folder of those, or `hf:OWNER/NAME` on the Hugging Face hub."""
    subset: str | None = None
    """Configuration name of a hub data set (`sample-100BT`)."""
    split: str = "train"
    """Split of a hub data set."""
    text_key: str = "text"
    """Column or JSON key that holds the text."""
    separator: str | None = "<|endoftext|>"
    """What separates documents in a `.txt` file; `null`: each file is one document."""
    tokenizer: str = "gpt2"
    """A tokenizer's name on the hub, a folder or `tokenizer.json`, or `train:SIZE` (sentencepiece BPE trained on the source)."""
    validation: str | None = None
    """Another source for validation (a file or folder, or a split name of the hub data set); `null`: held-out documents."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Share of documents held out when `validation` is not given."""
    max_tokens: Count | None = None
    """Stop preparing after so many training tokens; `null`: files whole, of a hub data set as much as the run reads."""
    cache_dir: str = "data"
    """Where token shards are kept; prepared once, found again by source and tokenizer."""


class TrainSection(Section):
    """Length of training, and batch sizes.

    global_batch (sequences) = micro_batch x accumulation x replicas x shards. It is what *all* replicas together
    consume in one step, so runs of every method have seen the same tokens after the same number of steps.
    The accumulation follows from the other four numbers.
    """

    steps: Count | None = None
    """Optimizer steps. Give this or `tokens`."""
    tokens: Count | None = None
    """Training tokens of all replicas; rounded down to whole steps. Give this or `steps`."""
    sequence_length: PositiveInt = 512
    """Tokens that one sequence predicts."""
    global_batch: PositiveInt = 32
    """Sequences per step, of all replicas together."""
    micro_batch: PositiveInt = 8
    """Sequences per forward pass on one rank."""
    document_mask: bool = False
    """A token sees no other document than its own, and positions begin anew in each; otherwise all that is before it in its
    sequence. With an attention of transformers a mask of sequence_length squared is made for every sequence."""
    deterministic: bool = False
    """Use only deterministic kernels (always so on the CPU); slower on GPUs."""
    gc_every: PositiveInt | None = 50
    """Steps between garbage collections, the same on every rank, so that no rank waits for another's; `null`: whenever Python
    likes."""

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence_length

    @property
    def total_steps(self) -> int:
        return self.steps if self.steps is not None else (self.tokens or 0) // self.tokens_per_step


class OptimSection(Section):
    """The inner optimizer, AdamW or SGD, and gradient clipping."""

    kind: Literal["adamw", "sgd"] = "adamw"
    """Inner optimizer; `sgd` is plain (no momentum), for checks against theory."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay on matrices; vectors (norms, biases) have none."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest gradient norm, over the whole model of one replica; `null`: no clipping."""
    nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """A gradient that is not finite: `stop` ends the run; `skip` leaves that step of the replica out and counts it, which waits
    for the device in every step; `rollback` also takes the replica back to its anchor, the parameters of the last
    synchronization. FSDP2 only."""


class ScheduleSection(Section):
    """Learning rate over steps: linear warm-up, then the given shape."""

    kind: Literal["cosine", "linear", "constant", "step"] = "cosine"
    """Shape after the warm-up; `step` stays at the peak and is multiplied by `decay_factor` at each of `decay_at`."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from 0."""
    final_ratio: Fraction = 0.1
    """Learning rate of the last step over the peak's (cosine and linear)."""
    decay_at: tuple[Fraction, ...] = (0.5, 0.75)
    """Shares of the run's steps after which the learning rate drops (step)."""
    decay_factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """What it is multiplied by (step)."""


class CpuMeshSection(Section):
    """A mesh for machines without a GPU, where no device says how many processes to start."""

    replicas: PositiveInt
    """Whole copies of the model."""
    shards: PositiveInt
    """Processes that hold one copy together."""


class ParallelSection(Section):
    """The mesh: `replicas` copies of the model, each held by `shards` ranks."""

    engine: Literal["fsdp2", "zero"] = "fsdp2"
    """What runs one replica: torch's FSDP2, or DeepSpeed ZeRO."""
    zero_stage: Literal[1, 2, 3] = 3
    """ZeRO shards the optimizer state in stage 1, also gradients in 2, also weights in 3.
    Layer-wise synchronization is layer by layer in 3; in 1 and 2 all layers synchronize at the start of the step."""
    zero_offload: bool = False
    """ZeRO: masters and optimizer state in CPU memory, where the optimizer runs."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Laid over the DeepSpeed configuration that the other keys make, for what they do not know."""
    replicas: PositiveInt | Literal["auto"] = "auto"
    """Whole copies of the model; slow network between them. `auto`: one a node; on one node, as many as fit in memory."""
    shards: PositiveInt | Literal["auto"] = "auto"
    """Ranks that hold one copy together; fast network between them. `auto`: the ranks of a node."""
    on_cpu: CpuMeshSection | None = None
    """What `auto` means on machines without a GPU, where launch/train.sh starts so many processes; with any other number
    of processes the mesh is ours."""
    precision: Literal["bf16", "fp32", "fp64"] = "bf16"
    """What forward and backward compute in; masters and optimizer stay fp32 (fp64: everything, for verification)."""
    compile: bool = False
    """torch.compile every layer on its own, what the loss does to logits, and the rounding of messages."""
    activation_checkpointing: bool | Literal["selective"] = False
    """Recompute every layer in backward instead of keeping its activations; `selective`: keep the results of matrix products
    and attention, which are expensive, and recompute the rest."""
    loss_chunk: PositiveInt = 1024
    """Positions whose logits exist at once; bounds the memory of tokens x vocabulary."""
    loss_kernel: Literal["torch", "liger"] = "torch"
    """What computes head and loss: torch, or on GPUs liger-kernel, if it is installed; its chunks are its own."""
    replica_backend: Literal["auto", "gloo", "nccl"] = "auto"
    """What carries traffic between replicas; `auto`: nccl on GPUs, gloo on CPUs."""
    replica_network: str | None = None
    """Network interface (`eth0`) of traffic between replicas; of `eth0,ens5` the first that a host has. `null`: what
    GLOO_SOCKET_IFNAME says, else the one that reaches the other hosts; on GPUs, nccl's own choice."""
    shard_network: str | None = None
    """The same for traffic within a replica. nccl has one choice for a process: between replicas if it carries that traffic."""
    shard_across_nodes: bool = False
    """Allow replicas that span nodes; with `shards: auto` as many nodes as a replica needs to fit in memory."""

    @property
    def given_on_cpu(self) -> list[int]:
        """Return those of replicas and shards that are known on a machine without a GPU, where `on_cpu` stands for `auto`."""
        cpu = self.on_cpu
        filled = [(self.replicas, cpu and cpu.replicas), (self.shards, cpu and cpu.shards)]
        return [size for given, default in filled if (size := default if given == "auto" else given) is not None]


class CheckpointSection(Section):
    """When the complete state is written, and how much of it stays."""

    every: PositiveInt | None = 1000
    """Steps between checkpoints; `null`: only the last one."""
    keep: PositiveInt = 3
    """How many of the newest checkpoints stay."""
    keep_every: PositiveInt | None = None
    """Checkpoints at multiples of so many steps stay for good."""
    background: bool = True
    """Training goes on while a copy of the state in the host's memory is written; `false`: it stands still, and needs no
    memory for the copy beyond that of one tensor."""
    mirror: str | None = None
    """Folder or URL that fsspec knows (`s3://bucket/runs`): complete checkpoints are copied there beside training, and fetched
    where they are newer than the run directory's."""

    def expired(self, steps: Iterable[int]) -> list[int]:
        """Of the steps of complete checkpoints, those whose checkpoints need not stay."""
        older = sorted(steps)[: -self.keep]
        return [step for step in older if self.keep_every is None or step % self.keep_every]


class TraceSection(Section):
    """Steps of which every rank writes down what it did when (trace/rank-*.jsonl), for timelines of `compare`."""

    first: PositiveInt = 1
    """The first such step."""
    steps: PositiveInt = 50
    """How many."""


class ProfileSection(Section):
    """Steps that torch.profiler records (profile/rank-*.json.gz, Chrome traces)."""

    first: Annotated[int, Field(ge=3)] = 10
    """The first such step; the one before it warms the profiler up."""
    steps: PositiveInt = 3
    """Number of steps. A trace has some megabytes per step."""
    ranks: tuple[NonNegativeInt, ...] = (0,)
    """The ranks that record."""

    @property
    def last(self) -> int:
        """Return the last step that is recorded."""
        return self.first + self.steps - 1


class WandbSection(Section):
    """Weights & Biases, beside metrics.jsonl. Needs the package wandb."""

    project: str
    """The project that the run appears in, by its `run.name`."""
    entity: str | None = None
    """User or team; `null`: wandb's own default."""
    mode: Literal["online", "offline"] = "online"
    """`offline` keeps everything in the run directory, for `wandb sync` later."""


class LogSection(Section):
    """Reports of a run while it trains."""

    every: PositiveInt = 10
    """Steps between lines of metrics."""
    tensorboard: bool = True
    """Also write TensorBoard events."""
    wandb: WandbSection | None = None
    """Also send every line to Weights & Biases, `{project, entity, mode}`; `null`: no."""
    trace: TraceSection | None = None
    """Record a timeline of some steps; `null`: none."""
    profile: ProfileSection | None = None
    """Record some steps with torch.profiler, `{first, steps, ranks}`; `null`: none."""


class SuiteSection(Section):
    """A suite of benchmarks on checkpoints, by a process beside training, which never waits for it (eval/README.md). The
    weights that it reads stay in export/, 4 bytes a parameter each time."""

    name: str
    """One of the package's suites (`small`, `offline`, `edit_paper`, `tinystories`) or a YAML file."""
    every: PositiveInt = 1
    """After every so-many-th checkpoint; after the last one in any case."""
    limit: Count | None = 200
    """Only so many documents of each task; `null`: what the suite says."""
    data_dir: str | None = None
    """Folder of the local data that suites like `offline` read."""
    device: str = "cpu"
    """What it computes on; a GPU's memory would be taken from training."""
    threads: PositiveInt = 4
    """CPU threads it may use, at the lowest priority."""
    wait_seconds: PositiveFloat = 1800
    """How long the end of the run waits for the last evaluation, before stopping it."""


class EvalSection(Section):
    """Validation of the replicas' mean, on a copy: measuring never changes the run."""

    every: PositiveInt | None = 1000
    """Steps between validations; `null`: only after the last step."""
    tokens: Count = 1_000_000
    """Validation tokens, always the same ones; fewer if there are fewer."""
    sets: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")], str] = Field(default_factory=dict)
    """Other texts to validate on, by name: files or folders (`{news: news.txt}`), read as `data.validation` is."""
    suite: SuiteSection | None = None
    """Benchmarks on checkpoints while training goes on; `null`: none."""
    sample_prompt: str | None = None
    """After training, let the model continue this text (`samples.txt`); `""`: from nothing; `null`: no sample."""
    sample_tokens: PositiveInt = 120
    """Length of that sample."""


class Recipe(Section):
    """A whole run."""

    run: RunSection
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    train: TrainSection = Field(default_factory=TrainSection)
    optim: OptimSection = Field(default_factory=OptimSection)
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    sync: SyncSection = Field(default_factory=SyncSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    log: LogSection = Field(default_factory=LogSection)
    eval: EvalSection = Field(default_factory=EvalSection)
