"""Aggregation rules: pure objects over NumPy vectors, one algorithm per file."""

from fedpsa_strategy.rules.base import Rule, Update
from fedpsa_strategy.rules.ca2fl import CA2FLRule
from fedpsa_strategy.rules.fedasync import FedAsyncRule
from fedpsa_strategy.rules.fedavg import FedAvgRule
from fedpsa_strategy.rules.fedbuff import FedBuffRule
from fedpsa_strategy.rules.fedfa import FedFaRule
from fedpsa_strategy.rules.fedpac import FedPACRule
from fedpsa_strategy.rules.fedpsa import FedPSARule

__all__ = [
    "CA2FLRule",
    "FedAsyncRule",
    "FedAvgRule",
    "FedBuffRule",
    "FedFaRule",
    "FedPACRule",
    "FedPSARule",
    "Rule",
    "Update",
]
