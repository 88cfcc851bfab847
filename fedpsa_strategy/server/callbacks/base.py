"""What a callback is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message

from fedpsa_strategy.methods.saving import plain, restored
from fedpsa_strategy.methods.vectors import Vector
from fedpsa_strategy.server.run_state import RunState, Task
from fedpsa_strategy.wire.replies import TrainReply


class Callback:
    """Looks at a run and its tasks and replies; overrides the hooks it needs.

    A reply goes through all `read` hooks first, then through all `check` hooks, each time in the
    order of the strategy's callbacks. Whoever raises InvalidReplyError refuses it. The loop's own
    work goes through the same hooks: `Stop` and `Evaluations` come before the strategy's callbacks,
    its `Checkpointer` comes last.

    Attributes
    ----------
    run : RunState
        The run, to be read only; known from `begin` on.
    saved : tuple[str, ...]
        The attributes that a checkpoint has to hold: numbers, texts, None, and lists, tuples,
        deques and mappings of them.
    """

    run: RunState
    saved: ClassVar[tuple[str, ...]] = ()

    def begin(self, run: RunState) -> None:
        """Get ready for a new run."""
        self.run = run

    def started(self) -> None:
        """Note that the nodes are there, and that the run begins or resumes."""

    def configure(self, task: Task, config: ConfigRecord) -> None:
        """Add to the config of a train message: a function of the task and the run's state."""

    def attach(self, task: Task) -> Mapping[str, ArrayRecord]:  # noqa: ARG002
        """Return further records of a train message."""
        return {}

    def read(self, task: Task, message: Message, reply: TrainReply) -> TrainReply:  # noqa: ARG002
        """Check and read what else a reply carries; `reply` is what was read so far."""
        return reply

    def check(self, task: Task, reply: TrainReply, sent: TrainReply) -> TrainReply:  # noqa: ARG002
        """Look at a well-formed update before it counts; `sent` is the update as it came."""
        return reply

    def accepted(self, task: Task) -> None:
        """Note that the rule has taken the task's update."""

    def rejected(self, task: Task) -> None:
        """Note that the task is given up."""

    def made(self, model: Vector) -> Vector:
        """Return the model of a new version; the rule continues with what is returned.

        What is added to the rule's `version_report` is in the version's event.
        """
        return model

    def published(self) -> None:
        """Look at a new version, which is the run's model now.

        If the run is interrupted before all callbacks have seen it, a resumed run shows it again.
        """

    def until(self, moment: float) -> bool:  # noqa: ARG002
        """Do what has to be done before the clock moves to `moment`.

        The clock may be moved to times before it. Return False if the run ends before it.
        """
        return True

    def stepped(self) -> None:
        """Look at the run between two steps, when its state can be saved."""

    def ends(self) -> str | None:
        """Return why the run has to end now; None if it continues."""
        return None

    def interrupted(self) -> None:
        """Save what a resumed run needs: a wish or an exception ends this one before its time."""

    def ended(self, reason: str) -> None:
        """Do what is left to do at the end of a run, whatever ended it but an exception."""

    def turn(self) -> None:
        """Look at the run, about twice a second."""

    def idle(self) -> None:
        """Do what the next reply will need, while there is none: called before a run waits.

        It may be interrupted at any point, so nothing of a run's state may change here.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a checkpoint has to hold: the attributes in `saved`."""
        return {name.lstrip("_"): plain(getattr(self, name)) for name in self.saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name in self.saved:
            setattr(self, name, restored(getattr(self, name), state[name.lstrip("_")]))


def hooks(callbacks: Iterable[Callback], name: str) -> list[Callable[..., Any]]:
    """Return the hooks of this name that do something, in order."""
    return [
        getattr(item, name)
        for item in callbacks
        if getattr(type(item), name) is not getattr(Callback, name)
    ]
