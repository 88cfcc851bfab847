"""``python -m fedpsa_strategy``: the command `fedpsa`."""

import sys

from fedpsa_strategy.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
