"""The command `fedpsa`: what works everywhere, and what a checkout of the app adds to it."""
