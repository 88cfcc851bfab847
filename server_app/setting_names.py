"""What a key that does not exist was probably meant to be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# What people call settings elsewhere.
_SYNONYMS = {
    "learning-rate": "lr",
    "eta": "lr",
    "step-size": "lr",
    "lr-schedule": "lr-decay",
    "epochs": "local-epochs",
    "num-epochs": "local-epochs",
    "minibatch-size": "batch-size",
    "bs": "batch-size",
    "rounds": "num-server-rounds",
    "num-rounds": "num-server-rounds",
    "versions": "num-server-rounds",
    "clients": "num-clients",
    "num-nodes": "num-clients",
    "num-supernodes": "num-clients",
    "nodes": "num-clients",
    "alpha": "dirichlet-alpha",
    "method": "strategy",
    "algorithm": "strategy",
    "data": "dataset",
    "model": "task",
    "days": "virtual-days",
    "timeout": "reply-timeout",
    "concurrency": "max-in-flight",
    "fraction-fit": "fraction-train",
    "mu": "proximal",
    "rho": "proximal",
    "random-seed": "seed",
    "output-dir": "run-dir",
    "checkpoint": "resume",
    "eval-every": "evaluate-every",
}


def hint_for(key: str, known: Iterable[str], otherwise: str) -> str:
    """Return what to say about a `key` that is not `known`: the one or two that may be meant."""
    names = {name.removeprefix("method.").lower().replace("_", "-"): name for name in known}
    names |= {word: names[name] for word, name in _SYNONYMS.items() if name in names}
    plain = re.sub(r"[\s_.]+", "-", key.strip().lower())
    close = [plain] if plain in names else difflib.get_close_matches(plain, names, 2, cutoff=0.7)
    similar = " or ".join(dict.fromkeys(names[name] for name in close))
    return f"did you mean {similar}?" if similar else otherwise
