"""Virtual hosts that are made to look like two sites: public addresses, firewalls, ranges of ports, and NAT."""

from __future__ import annotations

import shutil

import pytest

from llmtrain.compare.cluster.hosts import VirtualHost
from llmtrain.compare.cluster.processes import CommandError, run

PUBLIC = ("203.0.113.1", "203.0.113.2")
"""Addresses of a network that RFC 5737 reserves for documentation. llmtrain takes them for public ones."""


def why_no_firewall() -> str | None:
    """Return why virtual hosts can't have a firewall here, or None if they can."""
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
    """Replace the address that the cluster gave to a host's network card."""
    run("ip", "-n", host.mark, "address", "flush", "dev", f"eth{network}")
    run("ip", "-n", host.mark, "address", "add", f"{address}/24", "dev", f"eth{network}")


def add_rule(host: VirtualHost, rule: str, hook: str = "input") -> None:
    """Add a rule to a host's firewall, such as `tcp dport 1-99 drop`."""
    chain = f"add table inet site; add chain inet site {hook} {{ type filter hook {hook} priority 0; }}"
    inside(host, "nft", f"{chain}; add rule inet site {hook} {rule}")


def only_open(host: VirtualHost, ports: str, refusal: str = "reject with tcp reset") -> None:
    """Refuse connections from other hosts, except to these TCP ports."""
    add_rule(host, f"iifname != lo tcp flags & (syn|ack) == syn tcp dport != {{ {ports} }} {refusal}")


def take_ports_from(host: VirtualHost, first: int, last: int) -> None:
    """Make a host's listeners and connections take their ports from a range."""
    inside(host, "sysctl", "-qw", f"net.ipv4.ip_local_port_range={first} {last}")


def hide(first: VirtualHost, router: VirtualHost, hidden: VirtualHost) -> None:
    """Hide a host behind NAT: it reaches the first host only through the router."""
    for host, address in zip((first, router), PUBLIC, strict=True):
        set_address(host, address)
    run("ip", "-n", first.mark, "link", "set", "eth1", "down")
    run("ip", "-n", hidden.mark, "link", "set", "eth0", "down")
    run("ip", "-n", hidden.mark, "route", "add", "default", "via", router.addresses[1])
    inside(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
    chain = "add table ip nat; add chain ip nat out { type nat hook postrouting priority 100; }"
    inside(router, "nft", f"{chain}; add rule ip nat out oifname eth0 masquerade")
