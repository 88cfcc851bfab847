"""Launchers that run the Flower app on Flower's engines and leave nothing running behind."""
