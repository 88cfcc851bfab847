"""`python -m server_app.dashboard runs`: the live page of `fedpsa_strategy.watch.dashboard`."""

import sys

from fedpsa_strategy.watch.dashboard.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
