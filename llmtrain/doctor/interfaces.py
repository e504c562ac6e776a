"""Network interfaces of this host: their addresses and speeds, and the one to which other hosts connect."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.doctor.finding import Finding, ok, problem
from llmtrain.parallel.network import GLOO, NCCL, Networks, address_of, interfaces, is_loopback

SYSTEM = Path("/sys/class/net")


@dataclass(frozen=True)
class Card:
    """A network interface as reported by the kernel."""

    name: str
    address: str | None
    """IPv4 address; None if it has none."""
    is_up: bool
    mbit: int | None
    """Speed in Mbit/s; None if the kernel does not report it, as for virtual cards."""


def cards() -> list[Card]:
    """Return all network interfaces of this host, including loopback."""
    return [
        Card(name, address_of(name), _read(name, "operstate") in ("up", "unknown"), _speed(name))
        for name in interfaces()
    ]


def listed(found: Sequence[Card]) -> Finding:
    """Return one finding that lists all interfaces that are up or have an address."""
    shown = []
    for card in found:
        if card.address is None and not card.is_up:
            continue
        speed = f", {card.mbit / 1000:g} Gbit/s" if card.mbit else ""
        state = "" if card.is_up else ", down"
        shown.append(f"{card.name} ({card.address or 'no IPv4 address'}{speed}{state})")
    return ok("interfaces: " + ", ".join(shown))


def named_by_environment(found: Sequence[Card]) -> list[Finding]:
    """Return problems if GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME selects no interface with an address."""
    names = {card.name for card in found if card.address}
    advice = f"name one of: {', '.join(sorted(names))}"
    findings = []
    gloo, nccl = os.environ.get(GLOO), os.environ.get(NCCL)
    if gloo and not names & set(gloo.split(",")):
        findings.append(problem(f"{GLOO}={gloo}, but no such interface with an address is here", advice))
    if nccl and not _matches_nccl(nccl, names):
        findings.append(problem(f"{NCCL}={nccl} matches no interface with an address here", advice))
    return findings


def carries(networks: Networks) -> list[Finding]:
    """Return a finding on the interface of each axis in a run on several nodes.

    Loopback is a problem, because it reaches no other node.
    """
    findings = []
    for axis, name in (("replica", networks.replica), ("shard", networks.shard)):
        name = name or _from_environment()
        address = name and address_of(name)
        if not address:
            findings.append(ok(f"{axis} axis: the backend chooses the interface"))
        elif is_loopback(address):
            findings.append(
                problem(
                    f"{axis} axis over {name} ({address}), which leads to no other host",
                    f"set parallel.{axis}_network (or {GLOO}) to the interface that does",
                )
            )
        else:
            findings.append(ok(f"{axis} axis over {name} ({address})"))
    return findings


def listens_at(networks: Networks, towards_rank_0: str | None) -> tuple[str, str]:
    """Return (interface, address) for traffic between replicas.

    If no interface with an address is known, they are "?" and the address toward rank 0 (or 127.0.0.1).
    """
    name = networks.replica or _from_environment()
    address = name and address_of(name)
    if name and address:
        return name, address
    return "?", towards_rank_0 or "127.0.0.1"


def _from_environment() -> str | None:
    return os.environ.get(GLOO, "").partition(",")[0] or None


def _matches_nccl(given: str, names: set[str]) -> bool:
    """Return whether NCCL's rule selects any of `names`.

    `given` lists prefixes. A leading `=` makes them full names; a leading `^` selects all interfaces but these.
    """
    excluded, whole = given.startswith("^"), given.lstrip("^").startswith("=")
    wanted = tuple(given.lstrip("^=").split(","))
    return any((name in wanted if whole else name.startswith(wanted)) != excluded for name in names)


def _speed(name: str) -> int | None:
    text = _read(name, "speed")
    return int(text) if text.isdigit() and int(text) > 0 else None


def _read(name: str, what: str) -> str:
    try:
        return (SYSTEM / name / what).read_text().strip()
    except OSError:  # a virtual card has no speed and refuses the read; systems other than Linux have no such files
        return ""
