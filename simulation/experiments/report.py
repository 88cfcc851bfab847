"""One page with everything that was found, which needs no other file."""

from __future__ import annotations

import base64
import html
from dataclasses import dataclass
from pathlib import Path

from fedpsa_strategy.files import write_atomically
from simulation.errors import RunFailed
from simulation.experiments.answer import answer
from simulation.experiments.caption import short_caption, shown
from simulation.experiments.catalogue import EXPERIMENTS, Experiment
from simulation.experiments.html import inline_svg, to_html
from simulation.experiments.markdown import data_name
from simulation.experiments.options import PAPER_DAYS
from simulation.experiments.results import CELLS, PNG, SVG, TABLE, titled
from simulation.experiments.rows import Row, from_lines

_ANSWERING = ("table-accuracy", "table-midpoint")
_PARTS = Path(__file__).parent / "page"


@dataclass(frozen=True)
class Section:
    """The results of one experiment."""

    folder: str
    experiment: Experiment
    label: str
    rows: list[Row]
    table: str
    figure: str

    @property
    def name(self) -> str:
        """Its place in the page."""
        return _anchor(self.folder)

    @property
    def title(self) -> str:
        """Its heading, ready for the page."""
        return html.escape(titled(self.experiment, self.label))

    @property
    def state(self) -> str:
        """How many of its runs are finished."""
        total = len({row.id for row in self.rows})
        done = len({row.id for row in self.rows if row.completed})
        runs = "run" if total == 1 else "runs"
        return f"{total} {runs}" if done == total else f"{done} of {total} {runs}"

    @property
    def at_paper_scale(self) -> bool:
        """Whether its runs are as long as the paper's."""
        return all(row.scale["days"] == PAPER_DAYS for row in shown(self.rows))

    @property
    def scale(self) -> str:
        """What its runs are, and on what they ran."""
        return html.escape(short_caption(self.rows)).replace("\n", ".<br>")


def write_report(out: Path) -> Path:
    """Write ``index.html`` from all that exists in a folder of results."""
    sections = find_sections(out)
    if not sections:
        raise RunFailed(
            f"There are no results in {out} yet: make some with `python -m simulation reproduce"
            " NAME`; `python -m simulation list` shows the names."
        )
    path = out / "index.html"
    write_atomically(path, page(sections))
    return path


def find_sections(out: Path) -> list[Section]:
    """Return all results in a folder and its sub-folders, in the order of the catalogue."""
    folders = sorted(path.parent.relative_to(out) for path in out.glob(f"**/{CELLS}"))
    found = [section for folder in folders if (section := _read(out, folder)) is not None]
    order = list(EXPERIMENTS)
    return sorted(
        found,
        key=lambda section: (order.index(section.experiment.name), len(Path(section.folder).parts)),
    )


def page(sections: list[Section]) -> str:
    """Return the page."""
    template = (_PARTS / "page.html").read_text(encoding="utf-8")
    parts = {
        "STYLE": (_PARTS / "page.css").read_text(encoding="utf-8"),
        "CONTENTS": "\n".join(_contents(section) for section in sections),
        "ANSWER": _answer(sections),
        "SCALE": _scale(sections),
        "CARDS": "\n".join(_card(section) for section in sections),
        "SECTIONS": "\n".join(_section(section) for section in sections),
    }
    for name, text in parts.items():
        template = template.replace(f"<!--{name}-->", text)
    return template


def _read(out: Path, folder: Path) -> Section | None:
    # The longest name first: one may begin with another.
    for name in sorted(EXPERIMENTS, key=len, reverse=True):
        if folder.name == name or folder.name.startswith(f"{name}-"):
            break
    else:
        return None
    rows = from_lines((out / folder / CELLS).read_text(encoding="utf-8"))
    try:
        table = (out / folder / TABLE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    experiment = EXPERIMENTS[name]
    label = ", ".join(filter(None, [*folder.parent.parts, folder.name[len(name) + 1 :]]))
    figure = _figure(out / folder, _anchor(folder.as_posix()), experiment)
    return Section(folder.as_posix(), experiment, label, rows, table, figure) if rows else None


def _anchor(folder: str) -> str:
    return folder.replace("/", "-")


def _figure(folder: Path, prefix: str, experiment: Experiment) -> str:
    if (folder / SVG).exists():
        svg = (folder / SVG).read_text(encoding="utf-8")
        return inline_svg(svg, prefix, experiment.summary)
    if (folder / PNG).exists():
        data = base64.b64encode((folder / PNG).read_bytes()).decode()
        return f'<img alt="{html.escape(experiment.summary)}" src="data:image/png;base64,{data}">'
    return ""


def _answer(sections: list[Section]) -> str:
    """Return what the results say, before all else."""
    parts = []
    for section in sorted(sections, key=lambda section: not section.at_paper_scale):
        if section.experiment.name in _ANSWERING:
            days = f"{section.rows[0].scale['days']:g} virtual days"
            seeds = sorted({int(row.labels["seed"]) for row in section.rows if row.completed})
            for place, text in answer(section.rows).items():
                title = f"{html.escape(place)}, {days}, seeds {seeds[0]} to {seeds[-1]}"
                parts.append(
                    f'<div><h3><a href="#{section.name}">{title}</a></h3>{to_html(text)}</div>'
                )
    return f'<div class="answer">{"".join(parts)}</div>' if parts else ""


def _contents(section: Section) -> str:
    return f'<li><a href="#{section.name}">{section.title}</a></li>'


def _scale(sections: list[Section]) -> str:
    """Return what has to be said first: which scale is whose."""
    whole = sum(section.at_paper_scale for section in sections)
    ids = {row.id for section in sections for row in section.rows}
    done = {row.id for section in sections for row in section.rows if row.completed}
    missing = f" {len(ids) - len(done)} planned runs are missing." if len(done) < len(ids) else ""
    return (
        f'<p class="scale">{whole} of {len(sections)} tables and figures are from runs of the'
        f" paper’s {PAPER_DAYS:g} virtual days; the others are from shorter ones, with lower final"
        " accuracies and orders of methods that may still change. Each states its own scale, seeds"
        f" and machine below its heading. {len(done)} runs in all.{missing}</p>"
    )


def _card(section: Section) -> str:
    summary = html.escape(section.experiment.summary)
    datasets = dict.fromkeys(data_name(row.labels["dataset"]) for row in shown(section.rows))
    days = dict.fromkeys(f"{row.scale['days']:g}" for row in shown(section.rows))
    return (
        f'<a class="card" href="#{section.name}"><b>{section.title}</b>'
        f"<span>{summary}</span>"
        f"<small>{section.state} · {', '.join(datasets)} · {', '.join(days)} virtual days</small>"
        "</a>"
    )


def _section(section: Section) -> str:
    # What comes before the tables repeats what the section's head says.
    table = section.table.split("\n\n", 2)[2]
    return (
        f'<section id="{section.name}"><h2>{section.title}</h2>'
        f'<p class="lead">{html.escape(section.experiment.summary)}</p>'
        f'<p class="caption">{section.state}. {section.scale}</p>'
        f"<figure>{section.figure}</figure>{to_html(table)}"
        f'<p class="again">Files: <code>{section.folder}/</code></p></section>'
    )
