"""Central differential privacy of clients: updates are clipped, versions are noised.

Every update is scaled down to the norm C, every new version gets Gaussian noise of standard
deviation z · C · ω for each number, where ω is the largest weight with which an update enters a
version (`Method.largest_weight`; η/K for FedBuff). A client whose updates enter one version m times
moves it by at most m · C · ω, so all its participations together are worth n = Σ_versions m² of one
Gaussian mechanism with noise multiplier z, that is one with z / √n. The accountant turns that into
(ε, δ), for neighbouring data in which one client's updates are replaced by zeros. It assumes no
amplification by sampling: who is sampled in an asynchronous run is no secret, and not independent.
n is bounded: who has reached the bound takes no part any more.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from fedpsa_strategy.checks import check_range
from fedpsa_strategy.errors import IgnoredReplyError
from fedpsa_strategy.methods.base import Method
from fedpsa_strategy.methods.vectors import Vector, blocks
from fedpsa_strategy.server.callbacks.base import Callback
from fedpsa_strategy.server.callbacks.norm_guard import clipped
from fedpsa_strategy.server.run_state import RunState, Task
from fedpsa_strategy.wire.replies import TrainReply
from fedpsa_strategy.wire.text import shown_names

_STATISTICS = ("running_mean", "running_var")


class DifferentialPrivacy(Callback):
    """Gives a run (ε, δ)-differential privacy for its clients, if it is the last callback.

    It protects all published models, intermediate ones too, from everybody but the server.
    The server sees each update, its metrics and who sends it when. It needs the accountant of
    `dp-accounting` (`pip install "fedpsa-strategy[dp]"`).

    The noise is a function of a secret, the version and the model that it is added to. The secret
    comes from the operating system and is kept in checkpoints: a run that is resumed with the
    virtual clock ends in the same bits, and where other updates arrive the second time, the noise
    is another too.

    Parameters
    ----------
    clip : float
        C: the largest norm of an update.
    noise_multiplier : float
        z: standard deviation of the noise, relative to the most that one update can change.
    max_participations : int
        The largest n; see the module. A client whose updates never meet in a version has n uploads.
    delta : float (default: 1e-5)
        The δ for which ε is told; below 1 / number of clients.
    noise_seed : int (default: None)
        For experiments that have to be repeated: makes the noise predictable, so that it protects
        nobody.
    """

    def __init__(
        self,
        clip: float,
        noise_multiplier: float,
        max_participations: int,
        delta: float = 1e-5,
        noise_seed: int | None = None,
    ) -> None:
        check_range("clip", clip, above=0)
        check_range("noise_multiplier", noise_multiplier, above=0)
        check_range("max_participations", max_participations, least=1)
        check_range("delta", delta, above=0, most=0.5)
        check_range("noise_seed", noise_seed, least=0)
        self.clip = clip
        self.noise_multiplier = noise_multiplier
        self.max_participations = max_participations
        self.delta = delta
        self.noise_seed = noise_seed
        self.epsilon_bound = epsilon_of(noise_multiplier, max_participations, delta)

    def begin(self, run: RunState) -> None:
        """Get ready; refuses methods and models for which the noise would not be enough."""
        super().begin(run)
        method = run.rule.settings
        weight = weight_of(method)
        if weight is None:
            raise ValueError(
                f"DifferentialPrivacy: how much one update changes is not known for {method.label}:"
                " it may outlive its version, or change the weights of others; FedBuff would do"
            )
        if statistics := [key for key in run.model.states if key.endswith(_STATISTICS)]:
            raise ValueError(
                f"DifferentialPrivacy: {shown_names(statistics)} are statistics of clients' data, "
                "to which no noise is added: use GroupNorm or LayerNorm in place of BatchNorm"
            )
        self._deviation = self.noise_multiplier * self.clip * weight
        seed = self.noise_seed
        self._secret = (
            secrets.token_bytes(32)
            if seed is None
            else hashlib.blake2b(str(seed).encode(), digest_size=32).digest()
        )
        self._versions = 0
        self._spent: Counter[int] = Counter()  # by client, over the versions that are made
        self._current: Counter[int] = Counter()  # uploads for the one in the making

    def check(self, task: Task, reply: TrainReply, sent: TrainReply) -> TrainReply:  # noqa: ARG002
        """Return the update, clipped; ignores that of a client that has taken part too often.

        There is one only where a node has two tasks at a time.
        """
        if self._with_another(task.client) > self.max_participations:
            self._let_work(task.client)  # it may have been paused for a while since, or come back
            raise IgnoredReplyError(
                f"the client has used up its {self.max_participations} participations"
            )
        # What is not trained, such as a frozen backbone, stays as it is: it has no noise.
        reply = replace(reply, states=task.start.states)
        return clipped(reply, self.clip)

    def accepted(self, task: Task) -> None:
        """Count the participation."""
        self._current[task.client] += 1
        self._let_work(task.client)

    def made(self, model: Vector) -> Vector:
        """Return a new version with noise; add to the rule's report what is spent."""
        if self._versions != self.run.version:
            raise ValueError(
                f"DifferentialPrivacy: the run resumes from version {self.run.version}, which was "
                "made without it"
            )
        self._versions += 1
        members, self._current = self._current, Counter()
        for client, times in members.items():
            self._spent[client] += times * times
            self._let_work(client)
        largest = max(self._spent.values())
        self.run.rule.version_report |= {
            "epsilon": epsilon_of(self.noise_multiplier, largest, self.delta),
            "delta": self.delta,
            "epsilon_bound": self.epsilon_bound,
            "participations": largest,
        }
        return self._noised(model)

    def ends(self) -> str | None:
        """Return why the run ends when no client may take part any more."""
        run = self.run
        if run.in_flight or run.prepared or not run.clients.num_known:
            return None
        if any(self._with_another(c.index) <= self.max_participations for c in run.clients):
            return None
        return f"all clients have used up their {self.max_participations} participations"

    def state_dict(self) -> Mapping[str, Any]:
        """Return the secret of the noise, and who has taken part how often."""
        return {
            "settings": self._settings(),
            "secret": self._secret.hex(),
            "versions": self._versions,
            "spent": [[client, number] for client, number in self._spent.items()],
            "current": [[client, number] for client, number in self._current.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state["settings"] != self._settings():
            raise ValueError(
                f"DifferentialPrivacy: the checkpoint was made with {state['settings']}, not "
                f"{self._settings()}"
            )
        self._secret = bytes.fromhex(state["secret"])
        self._versions = state["versions"]
        self._spent = Counter({int(client): number for client, number in state["spent"]})
        self._current = Counter({int(client): number for client, number in state["current"]})

    def _settings(self) -> list[float]:
        return [self.clip, self.noise_multiplier, float(self.max_participations), self.delta]

    def _with_another(self, client: int) -> int:
        """Return a client's n after one more upload for the version in the making."""
        return self._spent[client] + (self._current[client] + 1) ** 2

    def _let_work(self, client: int) -> None:
        """Leave a client out for as long as it may not take part."""
        known = self.run.clients[client]
        if self._with_another(client) > self.max_participations:
            known.paused_until = math.inf
        elif known.paused_until == math.inf:
            known.paused_until = 0.0

    def _noised(self, model: Vector) -> Vector:
        # The model decides too: noise that is used twice, on models that differ, can be taken off.
        digest = hashlib.blake2b(key=self._secret, digest_size=16)
        digest.update(self._versions.to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(model).data)
        draw = np.random.Generator(np.random.Philox(key=np.frombuffer(digest.digest(), "<u8")))
        noised = np.empty_like(model)
        for part in blocks(len(model)):
            noised[part] = model[part] + self._deviation * draw.standard_normal(len(model[part]))
        return noised


def weight_of(method: Method) -> float | None:
    """Return the largest weight of an update, if it is known for the rule that the method has."""
    kind = type(method)
    says: type[Method] = next(
        base for base in kind.__mro__ if issubclass(base, Method) and "largest_weight" in vars(base)
    )
    if says is not Method and says.rule is not kind.rule:
        return None  # what was said of another rule
    return method.largest_weight


@cache
def epsilon_of(noise_multiplier: float, participations: int, delta: float) -> float:
    """Return the ε of so many Gaussian mechanisms, composed; exact, for any number of them.

    Raises
    ------
    ModuleNotFoundError
        When the accountant is not installed.
    """
    try:
        from dp_accounting import get_epsilon_gaussian
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "differential privacy needs the accountant of dp-accounting: "
            "pip install 'fedpsa-strategy[dp]', or pip install dp-accounting"
        ) from error
    with np.errstate(divide="ignore"):
        return float(get_epsilon_gaussian(noise_multiplier / math.sqrt(participations), delta))
