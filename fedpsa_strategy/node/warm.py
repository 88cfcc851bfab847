"""The warm process, as a program: ``python warm.py FOLDER LISTENER LIFELINE``.

It is run by its path and not as a module, because the interpreter is the one that Flower is
installed for, which may know another `fedpsa_strategy` than this one, or none.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

_exit_code = 0


def main() -> None:
    """Be warm; in the children, be what Flower wants to start."""
    global _exit_code
    # Registered first and so called last.
    atexit.register(_leave)
    root = str(Path(__file__).resolve().parents[2])
    # The first entry is the folder of a script, unless Python was told to leave it out.
    sys.path[: 0 if sys.flags.safe_path else 1] = [root]
    from fedpsa_strategy.node.keeper import keep

    folder, listener, lifeline = sys.argv[1:]
    program = keep(Path(folder), socket.socket(fileno=int(listener)), int(lifeline))
    # A child, with a main module of its own. What it raises goes to the interpreter, which ends
    # as after any script: it waits for threads, and calls what is to be called at the exit.
    try:
        exec(program, sys.modules["__main__"].__dict__)
    except BaseException as error:
        _exit_code = _code_of(error)
        raise


def _code_of(error: BaseException) -> int:
    """Return the exit code of a program that raised this."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _leave() -> None:
    """End here: to take apart all that was preloaded takes longer than many a training."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(_exit_code & 0xFF)


if __name__ == "__main__":
    main()
