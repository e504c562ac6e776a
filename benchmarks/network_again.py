"""New predictions for pages of network.py, with the current formula and the measurements on the page.

    python benchmarks/network_again.py                                 # benchmarks/results/network
    python benchmarks/network_again.py network_30mbit network_100mbit

A page is rewritten in place. Its line with the command then names the commits of its measurements and of its predictions.
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from network import add_options, options_of, prediction
from network_cells import METHODS, Cell
from network_page import COLUMNS, off_sentence, off_summary
from table import RESULTS, Row, commit, markdown, parser

SIZES = re.compile(r"(\d+) replicas x (\d+) shards, ([\d,]+) parameters, ([\d.]+) ms")
PREDICTED_AT = re.compile(r"; predictions made again at \S+(?=, Python)")
AT = {name: index for index, name in enumerate(COLUMNS)}


def rows_of(page: str) -> list[Row]:
    """Return the rows of a page's table. Raises SystemExit if the table has other columns than COLUMNS."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    cells = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]
    if not cells or cells[0] != COLUMNS:
        raise SystemExit("the page has another table than network.py's")
    return cells[2:]


def options_for(page: str) -> Namespace:
    """Return the options with which a page was measured, as far as the formula needs them."""
    replicas, shards, parameters, step = SIZES.search(page).groups()
    words = ["--replicas", replicas, "--shards", shards, "--parameters", parameters.replace(",", ""), "--step-ms", step]
    words += ["--keep-window"] if "no slow start after a pause" in page else []
    if downlink := re.search(r", downlink ([\d.e+]+)", page):
        words += ["--downlink", downlink[1]]
    arguments = parser("")
    add_options(arguments)
    return options_of(arguments, words)


def predicted_again(row: Row, options: Namespace) -> tuple[Row, str | None]:
    """Return a row with the current prediction, and a phrase that names the row if it is far off.

    Raises SystemExit for a row with keys of its own."""
    if row[0] not in METHODS:
        raise SystemExit(f"row {row[0]!r} has keys of its own, which the page does not name; measure it again")
    cell = Cell(row[0], row[1], int(row[AT["H"]]), float(row[AT["Mbit/s"]]), float(row[AT["ms"]]))
    expected, found = prediction(cell, options), list(row)
    off = float(row[AT["used"]].removesuffix(" %")) - 100 * expected.utilization
    found[AT["predicted"]] = f"{100 * expected.utilization:.1f} %"
    found[AT["off by"]] = f"{off:+.1f}"
    found[AT["predicted, s"]] = f"{expected.exposed:.2f}"
    exposed, waited = float(row[AT["exposed, s"]]), float(row[AT["waiting, s"]])
    return tuple(found), off_sentence(found, off, exposed, waited)


def rewritten(page: str) -> str:
    """Return a page with the current predictions."""
    options, rows, far = options_for(page), [], []
    old = rows_of(page)
    for row in old:
        again, sentence = predicted_again(row, options)
        rows.append(again)
        far += [sentence] if sentence is not None else []
    page = page.replace(markdown(COLUMNS, old, words=2), markdown(COLUMNS, rows, words=2))
    page = re.sub(
        r"^(More than [\d.]+ points off the prediction: |No row is more than ).*$", off_summary(far), page, flags=re.M
    )
    return re.sub(
        r"(commit \S+?)(?=, Python)", rf"\1; predictions made again at {commit()}", PREDICTED_AT.sub("", page), count=1
    )


def main() -> None:
    """Rewrite the pages that the command line names."""
    arguments = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    arguments.add_argument(
        "pages", nargs="*", default=["network"], metavar="PAGE", help="folders of benchmarks/results"
    )
    for name in arguments.parse_args(sys.argv[1:]).pages:
        path: Path = RESULTS / name / "README.md"
        path.write_text(rewritten(path.read_text()))
        print(path.read_text())


if __name__ == "__main__":
    main()
