"""`fedpsa dashboard`: the live page."""

from __future__ import annotations

from pathlib import Path

import click

from fedpsa_strategy.cli.main import examples


@click.command(
    "dashboard",
    short_help="show runs in a browser, live while they run",
    epilog=examples("fedpsa dashboard --open", "fedpsa dashboard runs/first runs/second --port 0"),
)
@click.argument("folders", nargs=-1, type=Path, metavar="[FOLDER]...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8050, show_default=True, help="0: any free one.")
@click.option("--open", "open_page", is_flag=True, help="Open the page in a browser.")
def command(folders: tuple[Path, ...], host: str, port: int, open_page: bool) -> int:
    """Show runs in a browser, live while they run.

    A FOLDER is a run, or holds runs (default: runs).
    """
    try:
        from fedpsa_strategy.watch.dashboard.serve import serve
    except ImportError as error:
        raise click.UsageError(
            f"the live page needs {error.name}: install the library with its extra `watch`"
        ) from None
    return serve(folders or (Path("runs"),), host, port, open_page=open_page)
