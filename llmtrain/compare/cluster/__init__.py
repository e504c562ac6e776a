"""Virtual cluster: hosts with their own network cards, bandwidths and shares of CPU time, on one Linux machine.

    limits = [HostLimits(bandwidth_mbit=100)] * 3 + [HostLimits(bandwidth_mbit=30, cpus=0.5)]
    with virtual_cluster(limits) as hosts:
        started = [host.popen(["torchrun", ..., "--master-addr", hosts[0].address]) for host in hosts]
        hosts[3].pause()
        ...
        print(hosts[0].sent(), "bytes have left host0")

Hosts are network namespaces, each joined by a veth pair to a bridge. This needs root and iproute2; `why_no_cluster`
reports what is missing. `loopback_cluster` gives hosts with the same API on 127.0.0.1, without root and without limits.

At the end of the `with` block the cluster and all processes in it are removed. The next process that creates a
cluster removes what a killed process left behind (`remove_leftovers`).
"""

from llmtrain.compare.cluster.hosts import (
    Host,
    VirtualHost,
    loopback_cluster,
    remove_leftovers,
    virtual_cluster,
    why_no_cluster,
)
from llmtrain.compare.cluster.limits import HostLimits

__all__ = [
    "Host",
    "HostLimits",
    "VirtualHost",
    "loopback_cluster",
    "remove_leftovers",
    "virtual_cluster",
    "why_no_cluster",
]
