"""``python -m fedpsa_strategy.node``: the same as ``fedpsa-node``."""

from fedpsa_strategy.node.launcher import main

if __name__ == "__main__":
    main()
