"""A virtual cluster: hosts with network cards, bandwidths and shares of CPU time of their own, on one Linux machine.

    limits = [HostLimits(bandwidth_mbit=100)] * 3 + [HostLimits(bandwidth_mbit=30, cpus=0.5)]
    with virtual_cluster(limits) as hosts:
        started = [host.popen(["torchrun", ..., "--master-addr", hosts[0].address]) for host in hosts]
        hosts[3].pause()
        ...
        print(hosts[0].sent(), "bytes have left host0")

Hosts are network namespaces, each joined by a veth pair to a bridge, which has a namespace of its own: the machine's own
network is not touched. That needs root and iproute2; `why_no_cluster` says what is missing. `loopback_cluster` gives hosts
to use in the same way, without root and without limits, on 127.0.0.1.

At the end of the `with` everything is gone, with all that still ran in it. What a killed process could not remove, the
next one that makes a cluster does (`remove_leftovers`).
"""

from llmtrain.compare.cluster.cleanup import remove_leftovers
from llmtrain.compare.cluster.create import loopback_cluster, virtual_cluster, why_no_cluster
from llmtrain.compare.cluster.hosts import Host, LoopbackHost, VirtualHost
from llmtrain.compare.cluster.limits import HostLimits

__all__ = [
    "Host",
    "HostLimits",
    "LoopbackHost",
    "VirtualHost",
    "loopback_cluster",
    "remove_leftovers",
    "virtual_cluster",
    "why_no_cluster",
]
