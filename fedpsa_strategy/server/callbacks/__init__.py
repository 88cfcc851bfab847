"""Cross-cutting work on tasks and replies: small objects with a few named hooks."""

from fedpsa_strategy.server.callbacks.base import Callback
from fedpsa_strategy.server.callbacks.norm_guard import NormGuard
from fedpsa_strategy.server.callbacks.plausible import Plausible
from fedpsa_strategy.server.callbacks.privacy import DifferentialPrivacy
from fedpsa_strategy.server.callbacks.staleness_limit import StalenessLimit
from fedpsa_strategy.server.callbacks.train_config import TrainConfig

__all__ = [
    "Callback",
    "DifferentialPrivacy",
    "NormGuard",
    "Plausible",
    "StalenessLimit",
    "TrainConfig",
]
