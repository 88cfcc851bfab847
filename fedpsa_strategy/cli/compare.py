"""`fedpsa compare`: runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import click

from fedpsa_strategy.cli.main import examples


@click.command(
    "compare",
    short_help="show runs side by side, seeds as mean ± deviation",
    epilog=examples(
        "fedpsa compare runs/first runs/second",
        "fedpsa compare runs --tag lr-search --plot curves.png",
        "fedpsa compare runs --json | jq '.runs[].accuracy'",
    ),
)
@click.argument("folders", nargs=-1, required=True, type=Path, metavar="FOLDER...")
@click.option("--tag", "tags", multiple=True, help="Only runs with this tag; may be repeated.")
@click.option("--each", is_flag=True, help="A line for each run, instead of one for all seeds.")
@click.option("--plot", type=Path, metavar="FILE.png", help="Also draw the curves into a file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def command(
    folders: tuple[Path, ...], tags: tuple[str, ...], each: bool, plot: Path | None, as_json: bool
) -> None:
    """Show runs side by side; a FOLDER is a run, or holds runs.

    Runs that differ in nothing but their seed become one line with mean and standard deviation.
    """
    from fedpsa_strategy.watch.comparison import compare
    from fedpsa_strategy.watch.event_log import plain
    from fedpsa_strategy.watch.runs import find_runs

    try:
        runs = [run for folder in folders for run in find_runs(folder)]
        runs = [run for run in runs if set(tags) <= set(run.tags)]
        if not runs:
            raise ValueError(f"no run there has the tags {', '.join(tags)}")
        found = compare({run.folder.resolve(): run for run in runs}.values())
        if plot is not None:
            found.plot().save(plot)
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from None
    except ImportError as error:
        raise click.UsageError(
            f"--plot needs {error.name}: install the library with its extra `watch`"
        ) from None
    if as_json:
        click.echo(json.dumps(plain({"runs": found.rows, "groups": found.groups}), indent=2))
    else:
        click.echo(found.text(each=each))
