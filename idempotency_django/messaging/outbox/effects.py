"""Effects elsewhere that happen if, and only if, a transaction is committed: once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from django.db import transaction

from ...records import reference
from ..databases import database
from .calls import Call, lease
from .publishing import publish, refuse_autocommit
from .topics import topic

logger = logging.getLogger("idempotency_django")

TOPIC: Final = "after_commit"


def after_commit(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> str:
    """Have a relay call the function once the transaction is committed. ::

        with transaction.atomic():
            order.pay()
            after_commit(send_receipt, order.pk)

        def send_receipt(order_id):
            key = current_execution().derive_key("receipt")
            mail.send(order_id, idempotency_key=key)

    The call is a message of the outbox, so nothing is lost where a process dies after the commit,
    and nothing happens after a rollback. It runs in the leased mode, in no transaction: one caller
    at a time, and not again once the function's return is recorded. A call that fails or is
    interrupted is repeated, with the same derived keys and without the steps that are done.

    Args:
        function: a function at the top of a module; what it returns is not kept.
        args: positional arguments: what JSON can say.
        kwargs: keyword arguments, likewise.

    Returns:
        The id of the message, which is also the key of the call's record.

    Raises:
        ImproperlyConfigured: no transaction is open on the database of the outbox.
        TypeError: another process would not find the function by its name, it does not take these
            arguments, or one of them is not JSON.
    """
    call = Call.of(function, args, kwargs)
    refuse_autocommit(database(), "after_commit")
    at_once = bool(topic(TOPIC).options.get("at_once"))
    delay = lease() if at_once else None  # then a relay sees to it, if that is necessary
    message_id = publish(TOPIC, call.signed(), type=call.path, delay=delay)
    if at_once:

        def attempt() -> None:
            try:
                call.run_once(message_id, reference(message_id, f"outbox:{TOPIC}"))
            except (Exception, SystemExit):  # the request, and what else follows its commit, go on
                logger.warning(
                    "The call of %s after the commit has failed. A relay calls it again.",
                    call.path,
                    exc_info=True,
                )

        transaction.on_commit(attempt, using=database())
    return message_id
