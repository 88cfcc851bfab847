"""The runs behind the results in this repository stay known, whatever defaults become.

Results that were recorded before there was a method lack its runs, and no others.
"""

import json
import re
import shlex
from pathlib import Path

import pytest

from simulation import cli
from simulation.experiments.catalogue import EXPERIMENTS
from simulation.experiments.choices import read_options
from support.commands import parsed

RESULTS = Path(cli.__file__).parents[1] / "results"
FOLDERS = sorted(path.parent for path in RESULTS.rglob("cells.jsonl"))


def check(cells, lines):
    recorded = [json.loads(line) for line in lines]
    methods = {row["labels"]["method"] for row in recorded}
    planned = [cell.id for cell in cells if cell.labels["method"] in methods]
    assert planned == [row["id"] for row in recorded]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(RESULTS)))
def test_the_command_of_a_result_plans_the_cells_that_were_run(folder):
    lines = (folder / "cells.jsonl").read_text(encoding="utf-8").splitlines()
    found = re.search(r"\*\*Made by\.\*\* `(.*)`", (folder / "table.md").read_text("utf-8"))
    assert found
    arguments = parsed(shlex.split(found[1])[3:])
    cells = EXPERIMENTS[arguments.name].cells(read_options(arguments))
    check(cells, lines)


def test_the_cells_of_digits_need_no_settings():
    command = "reproduce table-accuracy --datasets digits --alphas 0.1,0.5 --days 0.25"
    arguments = parsed(command.split())
    cells = EXPERIMENTS["table-accuracy"].cells(read_options(arguments))
    lines = (RESULTS / "digits" / "table-accuracy" / "cells.jsonl").read_text("utf-8").splitlines()
    check(cells, lines)
