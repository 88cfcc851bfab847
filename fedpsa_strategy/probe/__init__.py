"""How a model responds to the calibration batch, as k numbers."""
