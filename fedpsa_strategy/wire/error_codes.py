"""The codes of errors in replies, for which Flower has no public names: its ErrorCode."""

CLIENT_APP_RAISED = 2
"""The ClientApp raised an exception."""

MESSAGE_UNAVAILABLE = 3
"""The SuperLink has no such message, or not any more."""

REPLY_UNAVAILABLE = 4
"""The reply came too late."""

NODE_UNAVAILABLE = 5
"""The node has not been heard of for a while."""

CLIENT_APP_CRASHED = 8
"""The ClientApp took its process with it."""
