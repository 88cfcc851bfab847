"""What the containers run besides Flower's own commands."""
