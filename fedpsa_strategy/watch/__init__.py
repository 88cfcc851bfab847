"""What shows a run to people: event log, status line, live page, TensorBoard; for anybody's app.

All of them are listeners, or read what listeners wrote. Those that this package exports need the
standard library alone. The live page (`fedpsa_strategy.watch.dashboard`) and the picture of a run
need the extra `watch`, and TensorBoard the extra `tensorboard`.
"""

from fedpsa_strategy.watch.event_log import EventLog, read_events
from fedpsa_strategy.watch.run_log import RunLog
from fedpsa_strategy.watch.run_state import RunState
from fedpsa_strategy.watch.status_line import Limits, StatusLine
from fedpsa_strategy.watch.tensorboard import TensorBoardLog
from fedpsa_strategy.watch.version_log import VersionLog

__all__ = [
    "EventLog",
    "Limits",
    "RunLog",
    "RunState",
    "StatusLine",
    "TensorBoardLog",
    "VersionLog",
    "read_events",
]
