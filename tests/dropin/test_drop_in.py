"""An ordinary Flower app, before and after the few lines of docs/DROP_IN.md."""

import difflib
import re
from pathlib import Path

import pytest

from simulation.engines.ray import run_on_ray
from support import drop_in_app, lora_app
from support.drop_in_app import after, before

ROOT = Path(__file__).parents[2]


def diff_lines(before, after):
    lines = []
    for name in before:
        old, new = before[name].splitlines(), after[name].splitlines()
        lines += [
            line
            for line in difflib.unified_diff(old, new, name, name, n=0, lineterm="")
            if re.match(r"[+-](?![+-]).", line)
        ]
    return lines


@pytest.mark.parametrize(("number", "app", "most"), [(0, drop_in_app, 10), (1, lora_app, 16)])
def test_the_diff_is_small_and_the_one_that_the_docs_show(number, app, most):
    lines = diff_lines(app.before(), app.after())
    assert len(lines) < most
    text = (ROOT / "docs" / "DROP_IN.md").read_text()
    block = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)[number]
    shown = [line for line in block.splitlines() if re.match(r"[+-](?![+-]).", line)]
    assert sorted(shown) == sorted(lines)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("version", ["before", "after"])
def test_the_app_runs_on_the_ray_engine_before_and_after(version, tmp_path):
    app = tmp_path / "app"
    app.mkdir()
    files = before() if version == "before" else after()
    for name, text in files.items():
        (app / name).write_text(text)
    config = {"run-dir": str(tmp_path / "run"), "num-server-rounds": 6}
    summary = run_on_ray(app, config, num_clients=4)
    assert summary["strategy"] == ("FedAvg" if version == "before" else "FedPSA")
    accuracies = summary["accuracies"]
    assert set(accuracies) == {str(i) for i in range(7)}
    assert accuracies["6"] > 0.9
