"""The library's exceptions: each says what was wrong and what would be right."""

from __future__ import annotations


class FedPSAError(Exception):
    """Base class of all errors this library raises on purpose."""


class InvalidReplyError(FedPSAError):
    """A reply that must not touch the model; its text is the reason that the events carry."""


class ForgeryError(InvalidReplyError):
    """A reply that no honest client would send; its node is left out at once."""


class IgnoredReplyError(InvalidReplyError):
    """An update that does not count, though its client did nothing wrong."""


class TooStaleError(IgnoredReplyError):
    """An update that is ignored because the model has moved on."""


class OutOfMemoryReplyError(InvalidReplyError):
    """A node says that its memory, or that of its GPU, is full: it is asked again after a pause."""


class NodesMissingError(FedPSAError):
    """The nodes a run needs did not appear, or are not the ones it was set up for."""


class AllClientsFailedError(FedPSAError):
    """Nobody delivers usable updates any more; the text summarises the reasons."""


class DivergedError(FedPSAError):
    """The global model is no longer usable (non-finite numbers)."""


class NotRunningError(FedPSAError, RuntimeError):
    """A strategy was asked for something that needs a run, and has none."""
