# shop/settling.py
import logging

from django.db import close_old_connections
from shop.consumers import billing

from idempotency_django.contrib.messaging import Event, Failed, dead_letters

logger = logging.getLogger(__name__)
PAUSE = 5  # seconds before a message that failed is handled again


def settle(body: bytes, place: str, *, redelivered: bool) -> bool:
    """Handle a message; whether its broker may forget it."""
    close_old_connections()  # those that the database has closed
    event = None
    try:
        try:
            event = Event.from_json(body)
            billing.handle(event, redelivered=redelivered)
        except Exception as error:
            if event and not Failed(error).rejected:
                raise
            dead_letters.keep(billing, body, error, place=place)
    except Exception:  # also where the database cannot be reached
        logger.exception("The message at %s was not handled.", place)
        return False
    return True
