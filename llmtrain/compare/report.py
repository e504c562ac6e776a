"""Report of a comparison: report.md, report.html (one file) and plots/*.png."""

from __future__ import annotations

import base64
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from matplotlib.figure import Figure

import llmtrain
from llmtrain.compare import plots, tables
from llmtrain.compare.measures import Results, TrialKey, find_sweeps, gather
from llmtrain.compare.results import Trial
from llmtrain.compare.timeline import draw_timelines

REPOSITORY = Path(llmtrain.__file__).resolve().parents[1]
DPI = 150


def write_report(
    trials: Sequence[Trial],
    folder: Path,
    baseline: str | None = None,
    target: float | None = None,
    planned: Sequence[TrialKey] = (),
    command: str | None = None,
) -> Path:
    """Write report.md, report.html and plots/ into `folder`, replacing older ones. Return report.html's path.

    `baseline` names a run (by default, the synchronous one, else the first). `target` is a validation loss in nats per
    token (by default, the baseline's final loss under the same condition). `planned` lists the planned trials in the
    order of conditions and runs; those that have not run yet are shown as such. `command` is the command that made the
    trials. Raises ResultsError for a baseline that does not exist.
    """
    results = gather(trials, baseline, target, planned)
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    title = f"Comparison {folder.resolve().name}"
    environment = Environment(
        loader=PackageLoader("llmtrain.compare", "."), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"literal": tables.literal, "loss": tables.loss, "duration": tables.seconds}
    environment.filters["portable"] = lambda line: line.replace(f"{REPOSITORY}/", "")
    text = environment.get_template("report.md.j2").render(
        title=title,
        results=results,
        trials=list(results.trials["trial"].dropna()),
        headline=tables.headline(results),
        runs={name: tables.runs_table(results, name) for name in results.targets},
        wire=tables.wire_table(results),
        recipes=tables.recipes_table(results),
        **_pictures(results, folder),
        large_ratio=plots.LARGE_RATIO,
        words={trial.condition: trial.condition_in_words for trial in trials if trial.condition_in_words},
        command=command,
        has_file=(folder / "comparison.yaml").exists(),
        program=f"llmtrain {llmtrain.__version__} with Python {platform.python_version()}",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        system=f"{platform.system()} {platform.machine()}",
    )
    text = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
    html = environment.get_template("report.html.j2").render(title=title, body=html_body(text, folder))
    for name, content in {"report.md": text, "report.html": html}.items():
        unfinished = folder / f".{name}.new"
        unfinished.write_text(content)
        os.replace(unfinished, folder / name)  # a reader sees the old file or the new one
    return folder / "report.html"


def html_body(markdown: str, folder: Path) -> str:
    """Return a report in HTML with scrolling tables and embedded pictures, whose paths are relative to `folder`."""

    def figure(found: re.Match[str]) -> str:
        path, kind, caption = found.groups()
        content = base64.b64encode((folder / path).read_bytes()).decode()
        image = f'<img src="data:image/png;base64,{content}" alt="{caption}">'
        return f'<figure class="{kind}"><div class="scroll">{image}</div><figcaption>{caption}</figcaption></figure>'

    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    html = html.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")
    median_over_range = r'\1<span class="main">\2</span><span class="range">\3</span>'  # the range may be empty
    html = re.sub(r'(<td style="text-align:right">)(.*?)(?: \((.*)\))?(?=</td>)', median_over_range, html)
    html = re.sub(r"<p>(<img .*?)</p>", r'<div class="pictures">\1</div>', html, flags=re.DOTALL)
    return re.sub(r'<img src="(plots/(\w+).*?)" alt="(.*?)" />', figure, html)


def _pictures(results: Results, folder: Path) -> dict[str, str]:
    """Write plots/ and return the pictures' Markdown by section. Those in one paragraph are shown side by side."""

    def image(figure: Figure | None, name: str, caption: str) -> str:
        if figure is None:
            return ""
        path = f"plots/{re.sub(r'[^A-Za-z0-9._-]+', '_', name).strip('_.')}.png"
        figure.savefig(folder / path, dpi=DPI, metadata={"Software": None})
        return f"![{tables.literal(caption)}]({path})\n"

    styles, losses, times, timelines = plots.styles(results), [], "", []
    for sweep in find_sweeps(list(results.targets)):
        figure = plots.draw_throughput(results, sweep, styles)
        losses.append(image(figure, f"throughput-{sweep.label}", f"Tokens per second: {sweep.label}"))
    for name in results.targets:
        losses.append("")
        for cost, label in plots.AXES.items():
            figure = plots.draw_loss(results, name, cost, styles)
            losses[-1] += image(figure, f"loss_{cost}-{name}", f"{name}: validation loss against {label}")
        times += image(plots.draw_time(results, name), f"time-{name}", f"{name}: where the training time went")
        figure = draw_timelines(results, name)
        timelines.append(image(figure, f"timeline-{name}", f"{name}: what each rank did in a few rounds"))
    return {"losses": "\n".join(losses).strip(), "times": times, "timelines": "\n".join(timelines).strip()}
