"""The ServerApp: run config in, strategy, evaluation and files out."""
