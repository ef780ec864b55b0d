"""What every HTTP adapter adds: how its framework runs a view, and how it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Final

from django.http import HttpRequest
from django.http.response import HttpResponseBase

from ..conf import conf
from ..errors import ResponseNotStored
from ..policy import Policy
from ..policy.invocation import Invocation
from ..records import Payload, Record
from .messages import invocation_of, meta_name, response_of
from .negotiation import GivenTokens, nonce_is_in, refuse_unacceptable

_NOTHING: Final = nullcontext()
_OURS: Final = "idempotency_django."


class Adapter(ABC):
    """One request and its answer, as an adapter's framework handles them.

    Attributes:
        http_request: Django's request.
        request: the request as the framework's own views know it.
        method: the request's method.
        shows_page: whether the answer is a page about it, with the visitor's name and tokens.
        tokens: tells the CSRF tokens that the view gives out from those that were given out before
            it; ``None``: there were none.
    """

    http_request: HttpRequest
    request: Any
    method: str
    shows_page: bool = False
    tokens: GivenTokens | None = None

    def noticing(self) -> AbstractContextManager[None]:
        """The block, which belongs to the view, may give out CSRF tokens."""
        return self.tokens.noticed() if self.tokens else _NOTHING

    def header(self) -> str | None:
        """The key as the client sent it; ``None`` when it sent none."""
        header: str | None = self.http_request.META.get(meta_name(conf.header))
        return header

    def invocation(self, policy: Policy) -> Invocation:
        """What the policy needs to know of the request."""
        return invocation_of(self.http_request, policy)

    def scope(self) -> str | None:
        """The scope that the key is unique in, if the policy does not decide it."""
        return None

    @abstractmethod
    def respond(self) -> HttpResponseBase:
        """Run the view and render its answer."""

    async def arespond(self) -> HttpResponseBase:
        """The same, of an async view."""
        raise NotImplementedError

    @abstractmethod
    def recover(self, error: Exception, policy: Policy) -> HttpResponseBase:
        """The answer to the view's error, rendered or not; or raise the error again."""

    def rebuild(self, record: Record, policy: Policy) -> HttpResponseBase:
        """The answer of a record whose body was not kept.

        Raises:
            ResponseNotStored: there is no way to build it again.
        """
        if policy.rebuild is None:
            raise ResponseNotStored
        response: HttpResponseBase = policy.rebuild(record, self.http_request)
        return response

    def authorize(self, record: Record, policy: Policy) -> None:
        """Raise to refuse a replay to a caller who would be refused with a new key."""
        if policy.check_replay is not None:
            refuse_result(policy.check_replay(self.request, record), "check_replay of a policy")

    def refuse_unacceptable(self, payload: Payload) -> None:
        """Refuse a replay in a form that the request does not accept.

        Raises:
            AnswerNotAcceptable: the request does not accept the form.
        """
        refuse_unacceptable(self.http_request, payload)

    def lasting(self, response: HttpResponseBase) -> HttpResponseBase | None:
        """The answer in a form for retries; ``None``: the answer is for one visitor, once."""
        tokens = self.tokens or GivenTokens(self.http_request)
        if tokens.are_in(response) or nonce_is_in(response, self.http_request):
            return None
        return response

    def replayed(self, payload: Payload, policy: Policy) -> HttpResponseBase:
        """The stored answer."""
        return response_of(payload, policy)

    def native(self, response: HttpResponseBase) -> HttpResponseBase:
        """A response of this package, of the class that the framework's views return."""
        return response


def refuse_result(result: object, name: str) -> None:
    """Refuse a result of a replay check: ``False``, for example, would let everybody pass.

    Raises:
        TypeError: it returned something.
    """
    if result is not None:
        raise TypeError(
            f"The {name} returned {result!r}. It must return None, or raise PermissionDenied to "
            "refuse a replay."
        )


def shortened(error: Exception) -> Exception:
    """The error, its traceback without our frames above the view's and between them.

    Where the last frames are ours, as of an error of ours, these stay.
    """
    entries, trace = [], error.__traceback__
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    ours = [each.tb_frame.f_globals.get("__name__", "").startswith(_OURS) for each in entries]
    if all(ours):
        return error
    end = len(ours) - ours[::-1].index(False)
    kept = None
    for place in reversed(range(len(entries))):
        if place >= end or not ours[place]:
            each = entries[place]
            kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return error.with_traceback(kept)


def has_body(record: Record) -> bool:
    return record.payload is not None and record.payload.body is not None
