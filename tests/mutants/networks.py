"""Mistakes in virtual networks and in what is predicted of them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SWITCH, FORMULA, LIMITS = (
    ("tests/unit/test_frame_switch.py",),
    ("tests/unit/test_network_time.py",),
    ("tests/unit/test_virtual_cluster.py",),
)

MUTANTS = [
    Mutant(
        "switch: frames leave when they arrive",
        "llmtrain/compare/cluster/frame_switch.py",
        "(now + self.latency_seconds, frame)",
        "(now, frame)",
        SWITCH,
    ),
    Mutant(
        "switch: frames for one host go to all",
        "llmtrain/compare/cluster/frame_switch.py",
        "return [found] if found is not None else",
        "return",
        SWITCH,
    ),
    Mutant(
        "switch: no frame is lost",
        "llmtrain/compare/cluster/frame_switch.py",
        "if self.loss and self._drawn.random() < self.loss:",
        "if False:",
        SWITCH,
    ),
    Mutant(
        "network: a cable receives what it sends",
        "llmtrain/compare/cluster/limits.py",
        "return self.downlink_mbit or self.bandwidth_mbit",
        "return self.bandwidth_mbit",
        LIMITS,
    ),
    Mutant(
        "network: lost packets are as large as others",
        "llmtrain/compare/cluster/limits.py",
        "    if any(own.loss for own in limits):\n        return FRAME\n",
        "",
        LIMITS,
    ),
    Mutant(
        "prediction: latency counts one way",
        "llmtrain/plan/network_time.py",
        "return 2 * self.latency_seconds",
        "return self.latency_seconds",
        FORMULA,
    ),
    Mutant(
        "prediction: no slow start",
        "llmtrain/plan/network_time.py",
        "return self.round_trip * min(doublings, pause // (self.round_trip + TIMEOUT_SECONDS))",
        "return 0.0",
        FORMULA,
    ),
    Mutant(
        "prediction: bytes of messages at once take no time beyond the longest one's",
        "llmtrain/plan/network_time.py",
        "return max(link.transfer_seconds(sum(exchange.sent for exchange in exchanges)), *streams)",
        "return max(streams)",
        FORMULA,
    ),
    Mutant(
        "prediction: a delayed mean's second exchange is hidden",
        "llmtrain/plan/network_time.py",
        "return max(0.0, first - hidden) + second",
        "return max(0.0, first - hidden)",
        FORMULA,
    ),
    Mutant(
        "prediction: fragments have more time than their round",
        "llmtrain/plan/network_time.py",
        "exposed = max(exposed, sequence_seconds(messages, link) - compute)",
        "pass",
        FORMULA,
    ),
    Mutant(
        "connections: all collectives are on the first one",
        "llmtrain/parallel/comms.py",
        "group=self.groups[number], async_op=True",
        "group=self.group, async_op=True",
        ("tests/distributed/test_connections.py",),
    ),
    Mutant(
        "connections: every exchange takes the one with the fewest messages",
        "llmtrain/parallel/comms.py",
        "number = self._least_used() if collective is dist.all_reduce else 0",
        "number = self._least_used()",
        ("tests/distributed/test_connections.py",),
    ),
    Mutant(
        "connections: a large message is on one of them",
        "llmtrain/parallel/comms.py",
        "if len(self.groups) > 1 and tensor.nbytes > self.size * HOP_BYTES:",
        "if False:",
        ("tests/distributed/test_connections.py",),
    ),
    Mutant(
        "connections: the last part of a large message is not waited for",
        "llmtrain/parallel/collectives.py",
        "for part in self._parts:\n            part.wait()",
        "for part in self._parts[:-1]:\n            part.wait()",
        ("tests/distributed/test_connections.py",),
    ),
    Mutant(
        "connections: a message that has arrived counts as one in flight",
        "llmtrain/parallel/comms.py",
        "works[:] = (other for other in works if other is not work)",
        "pass",
        ("tests/distributed/test_connections.py",),
    ),
    Mutant(
        "connections: the shortest round trip of all ranks decides",
        "llmtrain/parallel/connections.py",
        '"comparing round trips").max()',
        '"comparing round trips").min()',
        ("tests/distributed/test_connections.py",),
    ),
    Mutant(
        "connections: a mesh never has more of them",
        "llmtrain/parallel/mesh.py",
        "mesh.replica_comms.add_groups(more)",
        "pass",
        ("tests/distributed/test_connections.py",),
    ),
    Mutant(
        "connections: rates are measured on the first one",
        "llmtrain/doctor/network_speed.py",
        "tensor.chunk(len(comms.groups))",
        "tensor.chunk(1)",
        ("tests/unit/test_doctor_ranks.py",),
    ),
    Mutant(
        "time estimate: far replicas have one connection",
        "llmtrain/plan/time_estimate.py",
        "connections = connections_for(2 * latency)",
        "connections = 1",
        ("tests/unit/test_plan_show.py",),
    ),
    Mutant(
        "network time: several connections carry no more messages at once",
        "llmtrain/plan/network_time.py",
        "return STREAMS * (link.connections if self.is_ring else 1)",
        "return STREAMS",
        ("tests/unit/test_network_time.py",),
    ),
]
