"""All checks in order, for a single process or for all ranks together."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from llmtrain.config import ParallelSection, Recipe
from llmtrain.doctor.collective_bench import bench_collectives
from llmtrain.doctor.finding import Finding, Level, console, has_problem, ok, problem, show, warning
from llmtrain.doctor.interfaces import cards, carries, listed, listens_at, named_by_environment
from llmtrain.doctor.links import SECRET_BYTES, Link, links_between, measure_all
from llmtrain.doctor.machine import environment, machine, software
from llmtrain.doctor.node_ranks import NodeRanks, RankIdentity, agreement, group, versions, who_is_where
from llmtrain.doctor.recipe_fit import Plan, fit, round_bytes
from llmtrain.errors import DONE, FAILED, TrainingError, UserError
from llmtrain.launch.process_count import processes_per_node
from llmtrain.parallel.build_engine import replica_backend
from llmtrain.parallel.mesh import local_device, open_mesh
from llmtrain.parallel.network import Networks
from llmtrain.parallel.rendezvous import Rendezvous, gather_over_store, rendezvous
from llmtrain.parallel.world import World, node_name
from llmtrain.plan.mesh_plan import choose_mesh
from llmtrain.train.devices import memory_of_rank


class ClusterCheck:
    """One rank's part in checking all ranks. Every method that gathers values is a collective of all ranks."""

    def __init__(self, recipe: Recipe | None, world: World, peers: Rendezvous, timeout_seconds: float):
        self.recipe, self.world, self.peers, self.timeout_seconds = recipe, world, peers, timeout_seconds

    def add_to(self, sections: dict[str, list[Finding]]) -> None:
        """Add the findings of the checks across ranks to this rank's `sections`. A collective of all ranks.

        Afterwards all ranks have the same problems, and so return the same exit code. Raises TrainingError if a rank
        stops answering or a collective fails.
        """
        ranks = [RankIdentity(**told) for told in self._gather("description", asdict(self._myself()))]
        hosts = group(ranks)
        several = len(hosts) > 1
        if several:
            sections["network"] += carries(self.peers.networks)
        plan = None
        if self.recipe is not None:
            memory = [rank_info.memory for rank_info in self.peers.ranks]
            sections["recipe"], plan = fit(self.recipe, self.peers.nodes, memory)
        if elsewhere := self._complaints_of_others(hosts, sections):
            sections["other hosts"] = elsewhere
        sections["ranks"] = [*who_is_where(hosts), *agreement(ranks)]
        sections["links"] = links_between(hosts, self._links(hosts)) if several else [ok("all ranks are on one host")]
        if all(self._gather("readiness", not has_problem(sections))):
            sections["collectives"] = self._collectives(plan)
        else:
            sections["collectives"] = [warning("not measured, because of the problems found", "solve them first")]

    def _myself(self) -> RankIdentity:
        rank_info = self.peers.ranks[self.world.rank]
        interface, address = listens_at(self.peers.networks, rank_info.address)
        device = str(local_device(self.world))
        return RankIdentity(
            self.world.rank, rank_info.node, rank_info.host, interface, address, device, versions(self.recipe)
        )

    def _complaints_of_others(self, hosts: Sequence[NodeRanks], own: Mapping[str, Sequence[Finding]]) -> list[Finding]:
        """Return the warnings and problems that other ranks have and this rank does not, each once per node."""
        mine = [finding for findings in own.values() for finding in findings if finding.level != Level.OK]
        told = self._gather("complaints", [asdict(finding) for finding in mine])
        known = {finding.what for finding in mine}
        return [
            Finding(Level(fields["level"]), f"{host}: {fields['what']}", fields["advice"])
            for host in hosts
            for fields in {entry["what"]: entry for rank in host.ranks for entry in told[rank.rank]}.values()
            if fields["what"] not in known
        ]

    def _links(self, hosts: Sequence[NodeRanks]) -> list[Link]:
        leaders = [host.leader.rank for host in hosts]
        # Rank 0's; without it, no other process on the network can use the servers.
        secret = bytes.fromhex(self._gather("secret", secrets.token_hex(SECRET_BYTES))[0])

        def exchange(name: str, value: Any) -> list[Any]:
            told = self._gather(name, value)
            return [told[rank] for rank in leaders]

        me = leaders.index(self.world.rank) if self.world.rank in leaders else None
        addresses = [host.leader.address for host in hosts]
        return measure_all(me, addresses, secret, self.timeout_seconds, exchange)

    def _collectives(self, plan: Plan | None) -> list[Finding]:
        """Benchmark the collectives of the recipe's mesh, or of the mesh that `auto` chooses if there is no recipe."""
        bytes_a_round = None
        if self.recipe is None or plan is None:
            parallel = ParallelSection()
            replicas, shard, _ = choose_mesh(parallel, self.peers.nodes, False, lambda shard: True)
        else:
            parallel, replicas, shard = self.recipe.parallel, plan.replicas, plan.shard
            if plan.size is not None and replicas > 1:
                bytes_a_round = round_bytes(self.recipe, plan.size, replicas, shard)
        backend = replica_backend(parallel)
        with open_mesh(self.world, replicas, shard, backend, self.timeout_seconds, self.peers) as mesh:
            return bench_collectives(mesh, bytes_a_round)

    def _gather(self, name: str, value: Any) -> list[Any]:
        """Return the JSON `value` of every rank, in rank order. A collective of all ranks."""
        return gather_over_store(self.peers.store, self.world, f"of the doctor, {name}", value, self.timeout_seconds)


Sections = dict[str, list[Finding]]


def run_checks(recipe: Recipe | None, world: World, timeout_seconds: float) -> int:
    """Run all checks, print the report on rank 0, and return the exit code: 1 if there is a problem.

    Every wait for other ranks ends within `timeout_seconds` plus GRACE_SECONDS. If ranks do not meet or a check across
    ranks fails, the error is a problem in rank 0's report and a TrainingError on the other ranks.
    """
    parallel = recipe.parallel if recipe else ParallelSection()
    found = cards()
    sections: Sections = {"software": software(), "machine": machine(world)}
    sections["network"] = [listed(found), *named_by_environment(found), *environment()]
    if world.size == 1:
        sections["network"] += _given_networks(parallel)
        if recipe is not None:
            sections["recipe"] = _alone(recipe)
    else:
        try:
            peers = rendezvous(world, parallel, lambda: memory_of_rank(world), timeout_seconds)
            ClusterCheck(recipe, world, peers, timeout_seconds).add_to(sections)
        except (TrainingError, UserError) as error:
            if world.rank != 0:
                raise TrainingError(str(error)) from error
            sections["ranks"] = [*sections.get("ranks", []), problem(str(error), "")]
    if world.rank == 0:
        show(sections, console())
    return FAILED if has_problem(sections) else DONE


def _given_networks(parallel: ParallelSection) -> list[Finding]:
    try:
        Networks.from_recipe(parallel)
    except UserError as error:
        return [problem(str(error), "")]
    return []


def _alone(recipe: Recipe) -> list[Finding]:
    """Return findings on the recipe as launch/train.sh would start it on this machine alone."""
    processes = processes_per_node(recipe.parallel, 1)
    each = memory_of_rank(World(0, processes, 0, processes))
    findings, _ = fit(recipe, [node_name()] * processes, [each] * processes)
    how_many = "1 process" if processes == 1 else f"{processes} processes"
    return [ok(f"launch/train.sh would start {how_many} on this machine alone"), *findings]
