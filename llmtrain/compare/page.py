"""A report as a list of sections, before it is Markdown or HTML; and the Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Text:
    """A paragraph; `code` in backticks."""

    text: str
    kind: str = "text"


@dataclass(frozen=True)
class Points:
    """A list."""

    items: tuple[str, ...]
    kind: str = "points"


@dataclass(frozen=True)
class Table:
    """The first `words` columns are words, the others numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    kind: str = "table"


@dataclass(frozen=True)
class Picture:
    """A PNG, as a path relative to the report, and what it shows."""

    path: Path
    caption: str


@dataclass(frozen=True)
class Pictures:
    """Side by side where there is room; `wide` ones below each other, in boxes that scroll."""

    pictures: tuple[Picture, ...]
    wide: bool = False
    kind: str = "pictures"


@dataclass(frozen=True)
class Lines:
    """What a program printed."""

    lines: tuple[str, ...]
    kind: str = "lines"


@dataclass(frozen=True)
class Heading:
    """Of a part of a section."""

    text: str
    kind: str = "heading"


Block = Text | Points | Table | Pictures | Lines | Heading


@dataclass
class PageSection:
    """Blocks under a title; left out of a report where it has none."""

    title: str
    blocks: list[Block] = field(default_factory=list)


@dataclass(frozen=True)
class Page:
    """A whole report."""

    title: str
    verdict: str
    details: tuple[str, ...]
    sections: tuple[PageSection, ...]


def markdown(page: Page) -> str:
    """The page in Markdown, with its pictures linked."""
    blocks = [f"# {page.title}", f"**{page.verdict}**"]
    if page.details:
        blocks.append(_markdown(Points(page.details)))
    for section in page.sections:
        blocks += [f"## {section.title}", *map(_markdown, section.blocks)]
    return "\n\n".join(blocks) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Text():
            return block.text
        case Heading():
            return f"### {block.text}"
        case Points():
            return "\n".join(f"- {item}" for item in block.items)
        case Table():
            return _markdown_table(block)
        case Pictures():
            return "\n\n".join(f"![{picture.caption}]({picture.path.as_posix()})" for picture in block.pictures)
    return "\n".join(f"    {line}" for line in block.lines)


def _markdown_table(table: Table) -> str:
    sides = ["---" if index < table.words else "---:" for index in range(len(table.columns))]
    return "\n".join(_row(cells) for cells in (table.columns, sides, *table.rows))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
