"""All checks in order, for one process or all ranks: where the ranks are, whether they agree, and whether the recipe fits them."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from llmtrain.config import ParallelSection, Recipe
from llmtrain.consistency import recipe_values
from llmtrain.doctor.finding import Finding, Level, console, has_problem, ok, problem, show_findings, verdict, warning
from llmtrain.doctor.machine import (
    UNKNOWN,
    axis_interfaces,
    disk,
    environment,
    identity,
    localhost,
    machine,
    network_cards,
    network_interfaces,
    replica_interface,
    software,
)
from llmtrain.doctor.network_speed import (
    SECRET_BYTES,
    Link,
    bench_collectives,
    links_between,
    measure_all,
    not_measurable,
    round_trip_ms,
    slow_start,
    starts_slowly,
)
from llmtrain.doctor.network_use import network_use, slowest_rate
from llmtrain.doctor.rank_identity import NodeRanks, RankIdentity, agreement, encryption, group, who_is_where
from llmtrain.doctor.run_folder import shared_run_folder
from llmtrain.doctor.token_space import missing_token_bytes
from llmtrain.errors import DONE, FAILED, ModelError, TrainingError, UserError, one_line
from llmtrain.launch.nodes import processes_per_node
from llmtrain.machine_check import check_machine
from llmtrain.parallel.mesh import local_device, open_process_mesh
from llmtrain.parallel.network import Networks
from llmtrain.parallel.ranks import replica_backend
from llmtrain.parallel.rendezvous import Peers, find_peers
from llmtrain.parallel.roll_call import gather_over_store
from llmtrain.parallel.world import World, node_name
from llmtrain.plan.memory import Memory, copies_background_checkpoints, estimate, run_bytes
from llmtrain.plan.mesh_plan import MEMORY_HEADROOM, choose_mesh, plan_mesh
from llmtrain.plan.model_size import ModelSize, size_of
from llmtrain.plan.time_estimate import HardwareRates, rate_here, round_bytes, traffic
from llmtrain.quantities import GIB, mesh_size
from llmtrain.recipe_check import check, check_group
from llmtrain.recipe_messages import one_of
from llmtrain.train.devices import memory_bytes, memory_of_rank

MESSAGE_LENGTH = 1000
"""Maximum characters of an error's message in the report."""

Sections = dict[str, list[Finding]]


@dataclass(frozen=True)
class Plan:
    """Mesh and model size of a recipe on the given ranks."""

    replicas: int
    shards: int
    size: ModelSize | None
    """None if the vocabulary size is unknown until the tokenizer is available."""


def fit(recipe: Recipe, nodes: Sequence[str], memory: Sequence[float]) -> tuple[list[Finding], Plan | None]:
    """Return findings on the recipe's mesh, memory, traffic and disk space, and its plan.

    The plan is None if the recipe cannot run on these ranks. `nodes` has the node name of each process, and `memory` the
    bytes that each process may use.
    """
    on_gpu = torch.cuda.is_available()
    try:
        check(recipe, len(nodes))
        check_machine(recipe)
        replicas, shards, reason = plan_mesh(recipe, nodes, memory, on_gpu)
        check_group(recipe, replicas)
    except UserError as error:
        return [problem(f"recipe: {error}", "")], None
    findings = [ok(f"mesh: {mesh_size(replicas, shards)} ({reason})")]
    if recipe.parallel.precision == "bf16" and on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        findings.append(problem("this GPU does not compute in bf16", "set parallel.precision=fp32"))
    size = written = tokens = None
    try:
        size = size_of(recipe)
    except ModelError as error:
        findings.append(warning(f"memory and traffic are not estimated: {error}", ""))
    else:
        needed = estimate(recipe, size, replicas, shards)
        findings.append(_memory(recipe, needed, on_gpu, min(memory)))
        if on_gpu and needed.host_total:
            ranks = max(Counter(nodes).values())
            findings.append(_cpu_memory(recipe, needed, ranks, memory_bytes(torch.device("cpu"))))
        sent = traffic(recipe, size, replicas)
        findings.append(ok(f"traffic between replicas: {' · '.join(sent.splitlines())}"))
        written = run_bytes(recipe, size, replicas)
        tokens = missing_token_bytes(recipe, size.vocabulary, nodes, shards)
    again = "; files that the run already has there are counted again"
    findings.append(disk("run.out_dir", recipe.run.out_dir, written, advice=again))
    findings.append(disk("data.cache_dir", recipe.data.cache_dir, tokens, "the run adds tokens of up to"))
    return findings, Plan(replicas, shards, size)


def _memory(recipe: Recipe, needed: Memory, on_gpu: bool, available: float) -> Finding:
    total, parallel = needed.total(on_gpu), recipe.parallel
    what = f"memory: about {total / GIB:.1f} GiB per process, of {available / GIB:.1f} GiB available"
    changes = {
        "lower train.micro_batch": recipe.train.micro_batch > 1,
        "set parallel.activation_checkpointing=true": parallel.activation_checkpointing is not True,
        "set sync.offload=true": on_gpu and needed.anchors > 0,  # without a GPU it moves nothing
        "set checkpoint.background=false": not on_gpu and copies_background_checkpoints(recipe),
        "use a larger parallel.shards": not parallel.in_process,
        "train fewer parallel.replicas": parallel.in_process,
    }
    return _if_it_fits(total, available, what, one_of([change for change, helps in changes.items() if helps]))


def _cpu_memory(recipe: Recipe, needed: Memory, ranks: int, available: float) -> Finding:
    """Return a finding on the CPU memory of a node with `ranks` ranks on GPUs and `available` bytes of memory."""
    offloads = {"sync.offload": recipe.sync.offload, "parallel.zero_offload": recipe.parallel.zero_offload}
    uses = [
        (
            needed.host_checkpoint,
            "copied for a checkpoint (pinned, which can take up to twice as much)",
            "set checkpoint.background=false" if copies_background_checkpoints(recipe) else "",
        ),
        (
            needed.pinned_total,
            "pinned for offloaded state",
            " or ".join(f"set {key}=false" for key, is_set in offloads.items() if is_set),
        ),
        (needed.host_models, "taken by the newest models, for group averages", "use another sync.schedule"),
        (needed.host_validation, "copied while the replicas' mean is validated", ""),
    ]
    taken = " or ".join(text for size, text, _ in uses if size)
    changes = ", ".join(change for size, _, change in uses if size and change)
    total = ranks * needed.host_total
    what = f"CPU memory: about {total / GIB:.1f} GiB per node are {taken}; this node has {available / GIB:.1f} GiB"
    return _if_it_fits(total, available, what, f"{changes}{', or ' * bool(changes)}use a larger parallel.shards")


def _if_it_fits(needed: float, available: float, what: str, advice: str) -> Finding:
    return ok(what) if needed <= MEMORY_HEADROOM * available else warning(f"{what}: it may run out", advice)


class ClusterCheck:
    """One rank's part in checking all ranks. All ranks must call the methods that gather values, because they are
    collectives."""

    def __init__(self, recipe: Recipe | None, world: World, peers: Peers, timeout_seconds: float):
        self.recipe, self.world, self.peers, self.timeout_seconds = recipe, world, peers, timeout_seconds

    def add_to(self, sections: Sections) -> Callable[[], list[Finding]] | None:
        """Add the findings of the checks across ranks to this rank's `sections`. Return the measurement of collectives, or None on all
        ranks if there is a problem. A collective of all ranks, and so is the measurement.

        Afterwards all ranks have the same problems, and so return the same exit code. Raises TrainingError if a rank
        stops answering.
        """
        ranks = [RankIdentity(**told) for told in self._gather("description", asdict(self._myself()))]
        hosts = group(ranks)
        several = len(hosts) > 1
        if several:
            sections["network"] += axis_interfaces(self.peers.networks)
        plan = None
        if self.recipe is not None:
            memory = [rank_info.memory for rank_info in self.peers.ranks]
            sections["recipe"], plan = fit(self.recipe, self.peers.nodes, memory)
            if several:
                leaders = [host.leader.rank for host in hosts]
                look = (self.recipe.run.out_dir, self.world.rank, leaders, self._gather, self.timeout_seconds)
                sections["recipe"] += shared_run_folder(*look)
        if elsewhere := self._complaints_of_others(hosts, sections):
            sections["other hosts"] = elsewhere
        sections["ranks"] = [*who_is_where(hosts), *agreement(ranks)]
        sections["links"], links = [ok("all ranks are on one host")], []
        if several:
            if unknown := [host.leader.host for host in hosts if self._has_no_address(host)]:
                sections["links"] = [not_measurable(unknown)]
            else:
                links = self._links(hosts)
                sections["links"] = [*links_between([str(host) for host in hosts], links), *slow_start(links)]
            sections["links"] += encryption(hosts, self.recipe.parallel if self.recipe else ParallelSection())
        if all(self._gather("readiness", not has_problem(sections))):
            return partial(self._collectives, plan, round_trip_ms(links))
        sections["collectives"] = [warning("not measured, because of the problems found", "solve them first")]
        return None

    def _myself(self) -> RankIdentity:
        rank_info = self.peers.ranks[self.world.rank]
        interface, address = replica_interface(self.peers.networks, rank_info.address)
        device = str(local_device(self.world))
        values = recipe_values(self.recipe) if self.recipe else {}
        return RankIdentity(
            self.world.rank, rank_info.node, rank_info.host, interface, address, device, identity(), values
        )

    def _complaints_of_others(self, hosts: Sequence[NodeRanks], own: Mapping[str, Sequence[Finding]]) -> list[Finding]:
        """Return the warnings and problems of other ranks that this rank does not have, each once per node."""
        mine = [finding for findings in own.values() for finding in findings if finding.level != Level.OK]
        told = self._gather("complaints", [asdict(finding) for finding in mine])
        known = {finding.what for finding in mine}
        return [
            Finding(Level(fields["level"]), f"{host}: {fields['what']}", fields["advice"])
            for host in hosts
            for fields in {entry["what"]: entry for rank in host.ranks for entry in told[rank.rank]}.values()
            if fields["what"] not in known
        ]

    def _has_no_address(self, host: NodeRanks) -> bool:
        """Return whether no IPv4 address is known at which other hosts reach this `host`."""
        return host.leader.interface == UNKNOWN and self.peers.ranks[host.leader.rank].address is None

    def _links(self, hosts: Sequence[NodeRanks]) -> list[Link]:
        leaders = [host.leader.rank for host in hosts]
        # Rank 0's secret keeps all other processes on the network from using the servers.
        secret = bytes.fromhex(self._gather("secret", secrets.token_hex(SECRET_BYTES))[0])

        def exchange(name: str, value: Any) -> list[Any]:
            # A rank whose link is stuck answers only after the timeout.
            told = self._gather(name, value, 2 * self.timeout_seconds)
            return [told[rank] for rank in leaders]

        me = leaders.index(self.world.rank) if self.world.rank in leaders else None
        addresses = [host.leader.address for host in hosts]
        return measure_all(me, addresses, secret, self.timeout_seconds, exchange)

    def _collectives(self, plan: Plan | None, round_trip: float) -> list[Finding]:
        """Benchmark the collectives of the recipe's mesh. Without a recipe, use the mesh that `auto` chooses, or replicas of one
        rank if hosts have different numbers of ranks. Predict the recipe's waits from the measured rates and the hosts' longest
        `round_trip` in milliseconds."""
        bytes_a_round = None
        if self.recipe is None or plan is None:
            is_even = len(set(Counter(self.peers.nodes).values())) == 1
            parallel = ParallelSection(shards="auto" if is_even else 1)
            replicas, shards, _ = choose_mesh(parallel, self.peers.nodes, False, lambda shards: True)
        else:
            parallel, replicas, shards = self.recipe.parallel, plan.replicas, plan.shards
            # A rank may not find the recipe's tokenizer or model on its host.
            if all(self._gather("size", plan.size is not None)) and replicas > 1:
                bytes_a_round = round_bytes(self.recipe, plan.size, replicas, shards)
        with open_process_mesh(
            self.world,
            replicas=replicas,
            shards=shards,
            replica_backend=replica_backend(parallel),
            timeout_seconds=self.timeout_seconds,
            peers=self.peers,
            connections=parallel.connections,
        ) as mesh:
            findings, rate = bench_collectives(mesh, bytes_a_round, round_trip / 1000, self.timeout_seconds)
            if bytes_a_round is not None and rate is not None:
                # One rank of each host computes alone, because the rate already takes into account how many share a device.
                mine = rate_here(self.recipe, self.world.local_size) if self.world.local_rank == 0 else None
                flops, uneven = slowest_rate(self.peers.nodes, self._gather("rate", mine), self.recipe, replicas)
                rates = HardwareRates(flops, 8e-6 * rate * shards, round_trip / 2, starts_slowly())
                findings += [*uneven, network_use(self.recipe, plan.size, replicas, shards, rates)]
        return findings

    def _gather(self, name: str, value: Any, patience: float | None = None) -> list[Any]:
        """Return the JSON `value` of every rank, in rank order. A collective of all ranks, which waits for `patience` seconds, by
        default the timeout."""
        seconds = self.timeout_seconds if patience is None else patience
        return gather_over_store(self.peers.store, self.world, f"of the doctor, {name}", value, seconds)


def run_checks(recipe: Recipe | None, world: World, timeout_seconds: float) -> int:
    """Run all checks, print the report on rank 0, and return the exit code: 1 if there is a problem.

    Every wait for other ranks ends within `timeout_seconds` plus GRACE_SECONDS, or twice as long while they measure links. If
    ranks do not meet or a check across ranks fails, the error becomes a problem in rank 0's report and a TrainingError on the
    other ranks.
    """
    out, measured, measure = console(), Sections(), None
    parallel = recipe.parallel if recipe else ParallelSection()
    sections: Sections = {"software": software(), "machine": machine(world)}
    sections["network"] = [*network_interfaces(network_cards()), *environment(), *localhost()]
    if world.size == 1:
        sections["network"] += _given_networks(parallel)
        if recipe is not None:
            sections["recipe"] = _alone(recipe)
    else:
        with _error_as_problem(world, sections, "ranks"):
            source = {"llmtrain": identity()["llmtrain"]}  # other versions may exchange other values
            peers = find_peers(world, parallel, lambda: memory_of_rank(world), timeout_seconds, source)
            measure = ClusterCheck(recipe, world, peers, timeout_seconds).add_to(sections)
    if world.rank == 0:
        show_findings(sections, out)  # before the measurement, because NCCL ends the process if a collective hangs
    if measure is not None:
        with _error_as_problem(world, measured, "collectives"):
            measured["collectives"] = measure()
        if world.rank == 0:
            show_findings(measured, out)
    if world.rank == 0:
        out.print()
        out.print(verdict([finding for part in (sections, measured) for found in part.values() for finding in found]))
    return FAILED if has_problem(sections) or has_problem(measured) else DONE


@contextmanager
def _error_as_problem(world: World, sections: Sections, name: str) -> Iterator[None]:
    """Add an error of the enclosed checks to section `name` as a problem on rank 0, and raise it as a TrainingError on other ranks."""
    try:
        yield
    except (UserError, RuntimeError) as error:
        # RuntimeErrors are TrainingErrors, and errors of CUDA and NCCL in many lines.
        # The doctor's timeout is an option, not a recipe key.
        told = one_line(error, MESSAGE_LENGTH).replace("run.timeout_seconds", "--timeout")
        if world.rank != 0:
            raise TrainingError(told) from error
        sections[name] = [*sections.get(name, []), problem(told, "")]


def _given_networks(parallel: ParallelSection) -> list[Finding]:
    try:
        Networks.from_recipe(parallel)
    except UserError as error:
        return [problem(str(error), "")]
    return []


def _alone(recipe: Recipe) -> list[Finding]:
    """Return findings on the recipe as `llmtrain launch` would start it on this machine alone."""
    try:
        processes = processes_per_node(recipe.parallel, 1)
        each = memory_of_rank(World(processes - 1, processes, processes - 1, processes))
    except UserError as error:
        return [problem(f"llmtrain launch would be refused on this machine: {error}", "")]
    started = ok(f"llmtrain launch would start {processes} process{'es' * (processes > 1)} on this machine alone")
    return [started, *fit(recipe, [node_name()] * processes, [each] * processes)[0]]
