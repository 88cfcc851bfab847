"""The command `simulation`, killed after so many uploads: by a thread of its own, in time.

From outside it could not be done: a run of small tasks may be over before another process looks.
Arguments: the uploads, the seconds from the last of them to the kill, and the command's own.
"""

import os
import signal
import sys
import threading

from simulation.cli import main
from simulation.engines.local.pool import WorkerPool

collect = WorkerPool.collect
left, delay = int(sys.argv[1]), float(sys.argv[2])


def collect_and_count(self, message_ids):
    global left
    replies = collect(self, message_ids)
    left -= sum(reply.metadata.message_type == "train" for reply in replies)
    if left == 0:
        left = -1
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True  # a run that is over in time is not killed at all
        timer.start()
    return replies


WorkerPool.collect = collect_and_count
sys.exit(main(sys.argv[3:]))
