"""Aggregation rules: pure objects over NumPy vectors, one algorithm per file."""

from fedpsa_strategy.methods.base import Rule, Update
from fedpsa_strategy.methods.ca2fl import CA2FLRule
from fedpsa_strategy.methods.fedasync import FedAsyncRule
from fedpsa_strategy.methods.fedavg import FedAvgRule
from fedpsa_strategy.methods.fedbuff import FedBuffRule
from fedpsa_strategy.methods.fedfa import FedFaRule
from fedpsa_strategy.methods.fedpac import FedPACRule
from fedpsa_strategy.methods.fedpsa import FedPSARule

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
