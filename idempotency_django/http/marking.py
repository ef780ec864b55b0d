"""``Idempotency-Status``: what became of a request, for the program that sent it.

The value is an item of RFC 9651, a token with parameters: ``executed; ttl=86399``. The tokens:

===============  ================================================================================
``executed``     the view ran. ``ttl``: for so many seconds, a retry gets this response;
                 ``stored=?0``: no retry gets it
``replayed``     the response of an earlier request; ``ttl`` likewise, and the ``attempt`` it is of
``not-replayed`` the operation was executed earlier, and its response cannot be given
``in-progress``  another request executes the operation
``held``         the operation waits for an operator
``expired``      the operation was executed earlier; its response has expired, and its key has not
``mismatch``     the key was used for another request
``refused``      the key cannot be used
``failed``       an error ended the request; its problem says what is known
===============  ================================================================================
"""

from __future__ import annotations

from typing import Final

from django.http.response import HttpResponseBase

from ..conf import conf
from ..errors import OperationInProgress
from ..stores.records import Operation, Record

IN_PROGRESS: Final = OperationInProgress.token
NOT_STORED: Final = "executed; stored=?0"


def mark(response: HttpResponseBase, status: str) -> None:
    """Tell the client what became of its request, unless the project has switched that off."""
    name = conf.status_header
    if name is not None:
        response[name] = status


def executed(operation: Operation, elapsed: float) -> str:
    """The status of a response that this request has stored.

    Args:
        operation: what was executed.
        elapsed: seconds since before the operation was claimed.
    """
    if operation.ttl is None:
        return "executed"
    left = operation.ttl.total_seconds() - elapsed
    return f"executed; ttl={max(0, int(left))}"


def replayed(record: Record) -> str:
    """The status of a replay."""
    ttl = "" if record.ttl_left is None else f"; ttl={max(0, int(record.ttl_left))}"
    return f"replayed{ttl}; attempt={record.attempt}"
