"""Messages that arrive twice have one effect, and messages that must follow a commit do.

Consumers need no tables. The inbox, the outbox and streams do: then this package is an app, too.
"""

from typing import TYPE_CHECKING

from ...lazy import lazily

if TYPE_CHECKING:
    from .consumers import Consumer
    from .events import Event
    from .inbox.receivers import WebhookReceiver
    from .outbox import after_commit, apublish, publish, publish_many

__all__ = [
    "Consumer",
    "Event",
    "WebhookReceiver",
    "after_commit",
    "apublish",
    "publish",
    "publish_many",
]

__getattr__ = lazily(
    __name__,
    globals(),
    {
        "Consumer": "consumers",
        "Event": "events",
        "WebhookReceiver": "inbox.receivers",
        "after_commit": "outbox",
        "apublish": "outbox",
        "publish": "outbox",
        "publish_many": "outbox",
    },
)
