"""Numbers, durations and sizes in units that people read."""

GIB = 2**30
YEAR = 365 * 24 * 3600.0
UNITS = (("days", 24 * 3600.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def counted(number: int, noun: str, separator: str = "") -> str:
    """Return a number with its noun in the singular or plural: `1 step`, `0 steps`, `2 processes`; with `,` as separator of
    thousands, `1,000 steps`."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:{separator}} {noun}{'' if number == 1 else plural}"


def mesh_size(replicas: int, shards: int) -> str:
    """Return the shape of a mesh: `1 replica x 4 shards`."""
    return f"{counted(replicas, 'replica')} x {counted(shards, 'shard')}"


def format_si(number: float) -> str:
    """Return a number with three digits and a unit: 41200 -> 41.2k."""
    number = float(f"{number:.3g}")  # first, so that 999600 is 1M
    for unit in ("", "k", "M", "G"):
        if abs(number) < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"


def format_duration(seconds: float) -> str:
    """Return a duration with up to three digits and its unit: `3.4 hours`, `120 seconds`, `1 second`, `35 ms`."""
    if seconds > YEAR:
        return "more than a year"
    name, unit = next(((name, unit) for name, unit in UNITS if seconds >= 1.5 * unit), UNITS[-1])
    if seconds and seconds < 0.95:
        return f"{_rounded(1000 * seconds)} ms"
    number = _rounded(seconds / unit)
    return f"{number} {name.removesuffix('s') if number == '1' else name}"


def format_elapsed(seconds: float) -> str:
    """Return a measured duration, rounded to seconds, or cut to minutes from an hour on: `8 s`, `1 min 56 s`, `2 h 5 min`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def _rounded(number: float) -> str:
    return f"{number:.0f}" if number >= 9.95 else f"{number:.2g}"
