"""What shows a run to people: event log, status line, live page, trackers; for anybody's app.

All of them are listeners, or read what listeners wrote. The live page
(`fedpsa_strategy.watch.dashboard`) and the picture of a run need the extra `watch`; each tracker
needs the extra of its name (`tensorboard`, `mlflow`, `wandb`, `prometheus`), which is imported when
the tracker is made. Everything else needs the standard library alone.
"""

from fedpsa_strategy.watch.event_log import EventLog, read_events
from fedpsa_strategy.watch.mlflow import MLflowLog
from fedpsa_strategy.watch.prometheus import PrometheusMetrics
from fedpsa_strategy.watch.run_log import RunLog
from fedpsa_strategy.watch.run_state import RunState
from fedpsa_strategy.watch.status_line import Limits, StatusLine
from fedpsa_strategy.watch.tensorboard import TensorBoardLog
from fedpsa_strategy.watch.version_log import VersionLog
from fedpsa_strategy.watch.wandb import WandbLog

__all__ = [
    "EventLog",
    "Limits",
    "MLflowLog",
    "PrometheusMetrics",
    "RunLog",
    "RunState",
    "StatusLine",
    "TensorBoardLog",
    "VersionLog",
    "WandbLog",
    "read_events",
]
