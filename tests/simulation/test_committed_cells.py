"""The runs behind the results in this repository stay known, whatever defaults become."""

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


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(RESULTS)))
def test_the_command_of_a_result_plans_the_cells_that_were_run(folder: Path) -> None:
    lines = (folder / "cells.jsonl").read_text(encoding="utf-8").splitlines()
    found = re.search(r"\*\*Made by\.\*\* `(.*)`", (folder / "table.md").read_text("utf-8"))
    assert found
    arguments = parsed(shlex.split(found[1])[3:])
    cells = EXPERIMENTS[arguments.name].cells(read_options(arguments))
    assert [cell.id for cell in cells] == [json.loads(line)["id"] for line in lines]


def test_the_cells_of_digits_need_no_settings() -> None:
    command = "reproduce table-accuracy --datasets digits --alphas 0.1,0.5 --days 0.25"
    arguments = parsed(command.split())
    cells = EXPERIMENTS["table-accuracy"].cells(read_options(arguments))
    lines = (RESULTS / "digits" / "table-accuracy" / "cells.jsonl").read_text("utf-8").splitlines()
    assert [cell.id for cell in cells] == [json.loads(line)["id"] for line in lines]
