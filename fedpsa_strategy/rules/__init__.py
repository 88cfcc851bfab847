"""Aggregation rules: pure objects over NumPy vectors, one algorithm per file."""

from fedpsa_strategy.rules.base import Rule, Update
from fedpsa_strategy.rules.fedbuff import FedBuffRule
from fedpsa_strategy.rules.fedpsa import FedPSARule

__all__ = ["FedBuffRule", "FedPSARule", "Rule", "Update"]
