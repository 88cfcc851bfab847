"""``python -m simulation``."""

import sys

from simulation.environment import restart_for_training

if __name__ == "__main__":
    restart_for_training()

    # Only now: nothing is imported twice.
    from simulation.cli import main

    sys.exit(main())
