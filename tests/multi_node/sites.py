"""Virtual hosts that are made to look like two sites: public addresses, firewalls, ranges of ports, and NAT."""

from __future__ import annotations

import shutil

import pytest

from llmtrain.compare.cluster.hosts import VirtualHost
from llmtrain.compare.cluster.processes import CommandError, run

PUBLIC = ("203.0.113.1", "203.0.113.2")
"""Of a network that the internet reserves for documentation (RFC 5737); for the program it is a public one."""


def why_no_firewall() -> str | None:
    """Why virtual hosts can't have a firewall here, or None."""
    if shutil.which("nft") is None:
        return "nft is not installed (package nftables)"
    try:
        run("nft", "list", "ruleset")
    except CommandError as error:
        return f"nft does not work here: {error}"
    return None


needs_nft = pytest.mark.skipif((reason := why_no_firewall()) is not None, reason=reason or "")


def inside(host: VirtualHost, *command: str) -> str:
    """Return what a command prints in the network of a host."""
    return run("ip", "netns", "exec", host.mark, *command)


def set_address(host: VirtualHost, address: str, network: int = 0) -> None:
    """Give a card another address than the cluster did."""
    run("ip", "-n", host.mark, "address", "flush", "dev", f"eth{network}")
    run("ip", "-n", host.mark, "address", "add", f"{address}/24", "dev", f"eth{network}")


def add_rule(host: VirtualHost, rule: str, hook: str = "input") -> None:
    """Add a rule to a host's firewall, such as `tcp dport 1-99 drop`."""
    chain = f"add table inet site; add chain inet site {hook} {{ type filter hook {hook} priority 0; }}"
    inside(host, "nft", f"{chain}; add rule inet site {hook} {rule}")


def only_open(host: VirtualHost, ports: str, refusal: str = "reject with tcp reset") -> None:
    """Refuse connections from other hosts, but for these TCP ports."""
    add_rule(host, f"iifname != lo tcp flags & (syn|ack) == syn tcp dport != {{ {ports} }} {refusal}")


def take_ports_from(host: VirtualHost, first: int, last: int) -> None:
    """Make listeners and connections of a host take their ports from a range."""
    inside(host, "sysctl", "-qw", f"net.ipv4.ip_local_port_range={first} {last}")


def hide(first: VirtualHost, router: VirtualHost, hidden: VirtualHost) -> None:
    """Leave a host of two networks no way to the first one but through a router, which hides it by NAT."""
    for host, address in zip((first, router), PUBLIC, strict=True):
        set_address(host, address)
    run("ip", "-n", first.mark, "link", "set", "eth1", "down")
    run("ip", "-n", hidden.mark, "link", "set", "eth0", "down")
    run("ip", "-n", hidden.mark, "route", "add", "default", "via", router.addresses[1])
    inside(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
    chain = "add table ip nat; add chain ip nat out { type nat hook postrouting priority 100; }"
    inside(router, "nft", f"{chain}; add rule ip nat out oifname eth0 masquerade")
