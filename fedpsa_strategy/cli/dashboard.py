"""`fedpsa dashboard`: the live page."""

from __future__ import annotations

from pathlib import Path

import click

from fedpsa_strategy.cli.main import examples


@click.command(
    "dashboard",
    short_help="show runs in a browser, live while they run",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    epilog=examples("fedpsa dashboard runs --open"),
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def command(words: tuple[str, ...]) -> int:
    """Show runs in a browser, live while they run."""
    try:
        from fedpsa_strategy.watch.dashboard.__main__ import main
    except ImportError as error:
        raise click.UsageError(
            f"the live page needs {error.name}: pip install the library with its extra `watch`"
        ) from None
    folder = ["runs"] if not words and Path("runs").is_dir() else []
    return main([*words, *folder])
