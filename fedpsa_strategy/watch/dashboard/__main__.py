"""`python -m fedpsa_strategy.watch.dashboard runs/<run> ...`: the same as `fedpsa dashboard`."""

import sys

from fedpsa_strategy.cli.main import main as fedpsa


def main(arguments: list[str] | None = None) -> int:
    """Serve the live page until interrupted; return the exit code."""
    return fedpsa(["dashboard", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
