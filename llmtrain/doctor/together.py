"""What ranks find out together: who is where, whether they agree, and what the network between them can do."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from llmtrain.config import ParallelSection, Recipe
from llmtrain.doctor.axes import axes
from llmtrain.doctor.finding import Finding, Level, has_problem, ok, warning
from llmtrain.doctor.fit import Plan, fit, round_bytes
from llmtrain.doctor.hosts import Host, Rank, agreement, group, versions, who_is_where
from llmtrain.doctor.interfaces import carries, listens_at
from llmtrain.doctor.links import SECRET_BYTES, Link, measure_all
from llmtrain.doctor.network_report import links_between
from llmtrain.parallel.build import replica_backend
from llmtrain.parallel.meeting import Meeting, roll_call
from llmtrain.parallel.mesh import local_device, open_mesh
from llmtrain.parallel.world import World
from llmtrain.plan.mesh import choose_mesh


class Together:
    """One rank's part in examining all of them. Every method that asks others is a collective of all ranks."""

    def __init__(self, recipe: Recipe | None, world: World, meeting: Meeting, timeout_seconds: float):
        self.recipe, self.world, self.meeting, self.timeout_seconds = recipe, world, meeting, timeout_seconds

    def add_to(self, sections: dict[str, list[Finding]]) -> None:
        """Add to what this rank found by itself. In the end all ranks have the same problems, and so end alike.

        Raises TrainingError when a rank stops answering or a collective fails.
        """
        ranks = [Rank(**told) for told in self._everyone("description", asdict(self._myself()))]
        hosts = group(ranks)
        several = len(hosts) > 1
        if several:
            sections["network"] += carries(self.meeting.networks)
        plan = None
        if self.recipe is not None:
            memory = [place.memory for place in self.meeting.places]
            sections["recipe"], plan = fit(self.recipe, self.meeting.nodes, memory)
        if elsewhere := self._complaints_of_others(hosts, sections):
            sections["other hosts"] = elsewhere
        sections["ranks"] = [*who_is_where(hosts), *agreement(ranks)]
        sections["links"] = links_between(hosts, self._links(hosts)) if several else [ok("all ranks are on one host")]
        if all(self._everyone("readiness", not has_problem(sections))):
            sections["collectives"] = self._collectives(plan)
        else:
            sections["collectives"] = [warning("not measured, because of the problems found", "solve them first")]

    def _myself(self) -> Rank:
        place = self.meeting.places[self.world.rank]
        interface, address = listens_at(self.meeting.networks, place.address)
        device = str(local_device(self.world))
        return Rank(self.world.rank, place.node, place.host, interface, address, device, versions(self.recipe))

    def _complaints_of_others(self, hosts: Sequence[Host], own: Mapping[str, Sequence[Finding]]) -> list[Finding]:
        """What other ranks have to complain of and this one has not; once a host."""
        mine = [finding for findings in own.values() for finding in findings if finding.level != Level.OK]
        told = self._everyone("complaints", [asdict(finding) for finding in mine])
        known = {finding.what for finding in mine}
        return [
            Finding(Level(fields["level"]), f"{host}: {fields['what']}", fields["advice"])
            for host in hosts
            for fields in {entry["what"]: entry for rank in host.ranks for entry in told[rank.rank]}.values()
            if fields["what"] not in known
        ]

    def _links(self, hosts: Sequence[Host]) -> list[Link]:
        leaders = [host.leader.rank for host in hosts]
        # Made by rank 0, so that nobody else on the network can use the servers.
        secret = bytes.fromhex(self._everyone("secret", secrets.token_hex(SECRET_BYTES))[0])

        def exchange(name: str, value: Any) -> list[Any]:
            told = self._everyone(name, value)
            return [told[rank] for rank in leaders]

        me = leaders.index(self.world.rank) if self.world.rank in leaders else None
        addresses = [host.leader.address for host in hosts]
        return measure_all(me, addresses, secret, self.timeout_seconds, exchange)

    def _collectives(self, plan: Plan | None) -> list[Finding]:
        """The recipe's mesh at work; without a recipe, the one that `auto` gives."""
        bytes_a_round = None
        if self.recipe is None or plan is None:
            parallel = ParallelSection()
            replicas, shard, _ = choose_mesh(parallel, self.meeting.nodes, False, lambda shard: True)
        else:
            parallel, replicas, shard = self.recipe.parallel, plan.replicas, plan.shard
            if plan.size is not None and replicas > 1:
                bytes_a_round = round_bytes(self.recipe, plan.size, replicas, shard)
        backend = replica_backend(parallel)
        with open_mesh(self.world, replicas, shard, backend, self.timeout_seconds, self.meeting) as mesh:
            return axes(mesh, bytes_a_round)

    def _everyone(self, name: str, value: Any) -> list[Any]:
        """Every rank's JSON `value`, by rank."""
        return roll_call(self.meeting.store, self.world, f"of the doctor, {name}", value, self.timeout_seconds)
