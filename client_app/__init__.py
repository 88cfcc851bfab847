"""The ClientApp: trains, evaluates and describes the node's own data."""
