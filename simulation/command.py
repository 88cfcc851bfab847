"""Commands that say in one sentence why they did not do what they were asked for."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from simulation.errors import Refused, RunFailed


class RefusedCommand(click.ClickException):
    """A command that cannot be carried out; it ends like one with a wrong option."""

    exit_code = 2


class LaunchCommand(click.Command):
    """Turns the errors of launches into a sentence and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Carry out the command."""
        try:
            return super().invoke(ctx)
        except Refused as refusal:
            raise RefusedCommand(str(refusal)) from refusal
        except RunFailed as failure:
            # Whoever followed the log has seen its end already.
            streamed = not ctx.params.get("quiet") and type(failure) is RunFailed
            raise click.ClickException(failure.reason if streamed else str(failure)) from failure
        except BrokenPipeError:
            # The reader of our output left. Python would complain about that once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(1)
        except (ValueError, TypeError, OSError) as error:
            raise click.ClickException(str(error)) from error
