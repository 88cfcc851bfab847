"""The methods, one file each: settings, what they need, and the rule as pure NumPy."""
