"""One page with everything that was found, which needs no other file."""

from __future__ import annotations

import base64
import html
from dataclasses import dataclass
from pathlib import Path

from simulation.errors import RunFailed
from simulation.experiments.catalogue import EXPERIMENTS, Experiment
from simulation.experiments.files import write_atomically
from simulation.experiments.html import inline_svg, to_html
from simulation.experiments.options import PAPER_DAYS
from simulation.experiments.results import CELLS, PNG, SVG, TABLE, folder_name, titled
from simulation.experiments.rows import Row, from_lines

_PARTS = Path(__file__).parent / "page"


@dataclass(frozen=True)
class Section:
    """The results of one experiment."""

    experiment: Experiment
    label: str
    rows: list[Row]
    table: str
    figure: str

    @property
    def name(self) -> str:
        """Its folder, and its place in the page."""
        return folder_name(self.experiment, self.label)

    @property
    def title(self) -> str:
        """Its heading, ready for the page."""
        return html.escape(titled(self.experiment, self.label))

    @property
    def done(self) -> int:
        """How many runs are finished."""
        return len({row.id for row in self.rows if row.completed})

    @property
    def total(self) -> int:
        """How many runs there should be."""
        return len({row.id for row in self.rows})

    @property
    def days(self) -> float:
        """How long the shortest of its runs is."""
        return min(float(row.scale["days"]) for row in self.rows)

    @property
    def seeds(self) -> int:
        """How many seeds there are."""
        return len({row.labels["seed"] for row in self.rows if row.completed})


def write_report(out: Path) -> Path:
    """Write ``index.html`` from all that exists in a folder of results.

    Raises
    ------
    RunFailed
        If there is nothing in it.
    """
    sections = [
        found
        for experiment in EXPERIMENTS.values()
        for label in _labels(out, experiment)
        if (found := _read(out, experiment, label)) is not None
    ]
    if not sections:
        raise RunFailed(
            f"There are no results in {out} yet: make some with `python -m simulation reproduce"
            " NAME`; `python -m simulation list` shows the names."
        )
    path = out / "index.html"
    write_atomically(path, page(sections))
    return path


def page(sections: list[Section]) -> str:
    """Return the page."""
    template = (_PARTS / "page.html").read_text(encoding="utf-8")
    parts = {
        "STYLE": (_PARTS / "page.css").read_text(encoding="utf-8"),
        "CONTENTS": "\n".join(_contents(section) for section in sections),
        "SCALE": _scale(sections),
        "CARDS": "\n".join(_card(section) for section in sections),
        "SECTIONS": "\n".join(_section(section) for section in sections),
    }
    for name, text in parts.items():
        template = template.replace(f"<!--{name}-->", text)
    return template


def _labels(out: Path, experiment: Experiment) -> list[str]:
    """Return the labels under which there may be results, the one without a label first."""
    start = f"{experiment.name}-"
    return ["", *sorted(path.name.removeprefix(start) for path in out.glob(f"{start}*"))]


def _read(out: Path, experiment: Experiment, label: str) -> Section | None:
    folder = out / folder_name(experiment, label)
    try:
        rows = from_lines((folder / CELLS).read_text(encoding="utf-8"))
        table = (folder / TABLE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    figure = _figure(folder, experiment)
    return Section(experiment, label, rows, table, figure) if rows else None


def _figure(folder: Path, experiment: Experiment) -> str:
    if (folder / SVG).exists():
        svg = (folder / SVG).read_text(encoding="utf-8")
        return inline_svg(svg, folder.name, experiment.summary)
    if (folder / PNG).exists():
        data = base64.b64encode((folder / PNG).read_bytes()).decode()
        return f'<img alt="{html.escape(experiment.summary)}" src="data:image/png;base64,{data}">'
    return ""


def _contents(section: Section) -> str:
    return f'<li><a href="#{section.name}">{section.title}</a></li>'


def _scale(sections: list[Section]) -> str:
    """Return what has to be said first: how far this is from the paper's scale."""
    share = min(section.days for section in sections) / PAPER_DAYS
    done, total = sum(s.done for s in sections), sum(s.total for s in sections)
    seeds = min(section.seeds for section in sections)
    sentences = []
    if share < 1:
        days = PAPER_DAYS * share
        sentences.append(
            f"<strong>This is not the paper’s scale.</strong> The shortest runs here last {days:g}"
            f" virtual days, the paper’s {PAPER_DAYS:g}: orders of methods may still change, and"
            " final accuracies are lower than they would be."
        )
    else:
        sentences.append(f"All runs last the paper’s {PAPER_DAYS:g} virtual days.")
    if seeds < 3:
        word = {0: "no seed is", 1: "a single seed is", 2: "two seeds are"}[seeds]
        sentences.append(f"Somewhere {word} all there is: small differences mean nothing there.")
    if done < total:
        sentences.append(f"{total - done} of {total} runs are missing.")
    percent = max(0.5, min(100.0, 100 * share))
    return (
        f'<div class="scale"><div class="bar"><span style="width: {percent:.1f}%"></span></div>'
        f"<p>{' '.join(sentences)}</p></div>"
    )


def _card(section: Section) -> str:
    summary = html.escape(section.experiment.summary)
    state = "complete" if section.done == section.total else f"{section.done} of {section.total}"
    return (
        f'<a class="card" href="#{section.name}"><b>{section.title}</b>'
        f"<span>{summary}</span>"
        f"<small>{section.total} runs, {state} · {section.days:g} days ·"
        f" {section.seeds} seed{'s' * (section.seeds != 1)}"
        "</small></a>"
    )


def _section(section: Section) -> str:
    # What comes before the tables repeats what the section's head says.
    table = section.table.split("\n\n", 2)[2]
    return (
        f'<section id="{section.name}"><h2>{section.title}</h2>'
        f'<p class="lead">{html.escape(section.experiment.summary)}</p>'
        f"<figure>{section.figure}</figure>{to_html(table)}"
        f'<p class="again">Files: <code>{section.name}/</code></p></section>'
    )
