"""Texts of network.py's pages: columns, rows that are far off their prediction, and notes."""

from __future__ import annotations

from collections.abc import Sequence

FAR_OFF = 3.0
"""Difference in percentage points between measured and predicted utilization above which a row is named."""
COLUMNS = (
    "method",
    "wire",
    "H",
    "Mbit/s",
    "ms",
    "used",
    "min to max",
    "predicted",
    "off by",
    "exposed, s",
    "waiting, s",
    "predicted, s",
    "MB",
    "beyond",
)


def off_sentence(row: Sequence[str], off: float, exposed: float, waited: float) -> str | None:
    """Return a phrase that names a row more than FAR_OFF points off its prediction, or None for any other row."""
    if abs(off) <= FAR_OFF:
        return None
    of_it = f", {max(0.0, exposed - waited) / max(exposed, 1e-9):.0%} of the exposed time not waiting for messages"
    return f"{' '.join(row[:5])} ({off:+.1f}{of_it})"


def off_summary(far: Sequence[str]) -> str:
    """Return one line with the phrases of the rows that are far off."""
    if far:
        return f"More than {FAR_OFF:g} points off the prediction: {', '.join(far)}."
    return f"No row is more than {FAR_OFF:g} points off."


def notes(blocks: int, payload: float) -> str:
    """Return the page's notes, given the number of blocks and the payload's share of a frame."""
    return f"""\
*H*: local steps in a round; 1 where every step averages gradients. *ms*: latency, one way. *Used*: utilization, which is the
time that a round's steps take alone over the round's time: the median over rounds of the mean over ranks, and the smallest and
largest round. *Predicted*: the same by `llmtrain/plan/network_time.py`, from bytes, bandwidth, latency and the schedule alone.
No constant in it is fitted; where its rules were corrected after a measurement, docs/network.md says so. *Off by*: points
of utilization. *Exposed*: what a round takes beyond its steps alone, and of it the waiting of the replica's own thread for
messages; the rest is arithmetic, and in `wagma` waiting for a thread; what is predicted is the network's part. *MB*: bytes that
left a host's network card per round, and how many they are *beyond* the formula's: headers and acknowledgments, what TCP sent
again, and messages of agreement. A card counts one header for the pieces of a packet that it segments itself.

A step is a sleep of fixed length whose first third is the forward, in {blocks} blocks of equal size; gradients are sent during
the rest of it, as the engines do. Bandwidth is that of the cable in each direction, headers included; messages have
{100 * payload:.1f} % of it. TCP is the kernel's (reno), with its slow start after a pause unless `--keep-window` is given."""
