"""One request within a REST framework view, as the adapters of all frameworks have it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from django.http import HttpResponse, QueryDict
from django.http.response import HttpResponseBase
from django.utils.datastructures import MultiValueDict
from rest_framework.parsers import FileUploadParser, FormParser, MultiPartParser
from rest_framework.request import Empty, Request
from rest_framework.response import Response

from ..errors import IdempotencyError
from ..http.adapter import Adapter, shortened
from ..http.atomic_requests import RequestTransactions
from ..http.bodies import (
    as_file,
    body_of,
    body_that_django_ignores,
    form_of,
)
from ..http.messages import invocation_of, response_of
from ..http.objects import check_object, has_object
from ..http.serving import serve
from ..http.streams import raw_body_of, rewind
from ..policy import Policy, resolve
from ..policy.invocation import Body, Form, Hashed, Invocation, Parsed
from ..records import Payload, Record
from .objects import check_checked
from .problems import problem
from .responses import (
    PAGES,
    StoredResponse,
    is_json,
    is_page,
    rendered_by,
    without_page,
)


class DRFAdapter(Adapter):
    """One request within a DRF view."""

    policy: Policy

    def __init__(self, view: Any, request: Request, handler: Callable[[], Any]) -> None:
        self.http_request = request._request
        self.request = request
        self.method = request.method or ""
        self.view = view
        self.transactions: RequestTransactions | None
        self.transactions = getattr(view, "_idempotency_transactions", None)
        self._handler = handler

    def invocation(self, policy: Policy) -> Invocation:
        own = self.request
        return invocation_of(self.http_request, policy, own=own, auth=own.auth, body=self._body)

    def respond(self) -> HttpResponseBase:
        view = self.view
        if getattr(self.http_request, "idempotency", None):
            check = view.check_object_permissions
            view.check_object_permissions = partial(check_checked, self.checks_replays, check, view)
        response = self._finalized(self._handler())
        return response.render() if hasattr(response, "render") else response

    def checks_replays(self) -> bool:
        """Whether a replay is refused to callers who lost their permission for an object."""
        return self.policy.check_replay is not None or has_object(self.view)

    def authorize(self, record: Record, policy: Policy) -> None:
        super().authorize(record, policy)
        check_object(self.view, record)

    def refuse_unacceptable(self, payload: Payload) -> None:
        if not self._shows_as_page(payload):
            super().refuse_unacceptable(payload)

    def lasting(self, response: HttpResponseBase) -> HttpResponseBase | None:
        if not is_page(response):
            return super().lasting(response)
        renderer = without_page(self.view)
        return rendered_by(renderer, self.view, response) if renderer else None

    def replayed(self, payload: Payload, policy: Policy) -> HttpResponseBase:
        response = response_of(payload, policy)
        if not self._shows_as_page(payload):
            return response
        content = StoredResponse(response).data
        del response["Content-Type"]
        return Response(content, response.status_code, headers=response.headers)

    def native(self, response: HttpResponseBase) -> HttpResponseBase:
        if isinstance(response, Response) or not isinstance(response, HttpResponse):
            return response
        return StoredResponse(response)

    def _shows_as_page(self, payload: Payload) -> bool:
        """Whether a replay is rendered as a page for this request, with its user and its token."""
        return is_page(self.request) and bool(payload.body) and is_json(payload.headers)

    def recover(self, error: Exception, policy: Policy) -> HttpResponseBase:
        # Not rendered here: within ATOMIC_REQUESTS the transaction is still to roll back, and a
        # renderer may ask the database for something.
        with self.apart():
            return self._finalized(self.view.handle_exception(error))

    def apart(self) -> AbstractContextManager[None]:
        return self.transactions.apart() if self.transactions else nullcontext()

    def _finalized(self, response: HttpResponseBase) -> HttpResponseBase:
        """Finalise now, and prevent DRF from finalising the same response again."""
        finalize = self.view.finalize_response

        def once(request: Request, given: HttpResponseBase, *args: Any, **kwargs: Any) -> Any:
            return given if given is finished else finalize(request, given, *args, **kwargs)

        finished = finalize(self.request, response, *self.view.args, **self.view.kwargs)
        self.shows_page = isinstance(getattr(finished, "accepted_renderer", None), PAGES)
        self.view.finalize_response = once
        return finished  # type: ignore[no-any-return]

    def _body(self) -> Body:
        """What was sent, as the view's parser has it; the view can read it again."""
        http: Any = self.http_request
        if "HTTP_TRANSFER_ENCODING" in http.META:
            unseen = body_that_django_ignores(http)
            if unseen is not None:
                return unseen
        request: Any = self.request  # some of whose attributes its types say may be missing
        if http._read_started and not hasattr(
            http, "_body"
        ):  # an authentication has looked into a form
            return self._parsed(None)
        parser: Any = request.negotiator.select_parser(request, request.parsers)
        if type(parser) in (MultiPartParser, FormParser):
            return body_of(http)
        raw = raw_body_of(http)
        if parser is None:  # the view reads the stream itself, or refuses
            return raw
        if isinstance(parser, FileUploadParser):
            name = parser.get_filename(request.stream, request.content_type, request.parser_context)
            return Form({}, (as_file(raw, name or "", request.content_type or ""),))
        try:
            if isinstance(request.data, QueryDict) or request.FILES:
                return self._parsed(raw)
            return Parsed(request.data, raw)
        except Exception:  # noqa: BLE001  # whatever the parser refuses, in whatever way
            # The view meets it itself, if it looks: REST framework would show it an empty body now.
            request._data = request._files = request._full_data = Empty
            return raw
        finally:
            rewind(http, http._stream)

    def _parsed(self, raw: bytes | Hashed | None) -> Body:
        data, files = self.request.data, self.request.FILES
        if not (files or isinstance(data, QueryDict)):
            return Parsed(data, raw)
        if not isinstance(files, MultiValueDict):  # a parser of files only makes a plain dict
            files = MultiValueDict({name: [file] for name, file in files.items()})
        return form_of(data if isinstance(data, QueryDict) else MultiValueDict(), files)


def answer(
    adapter_class: type[DRFAdapter],
    view: Any,
    policy: Policy,
    request: Request,
    run: Callable[[], Any],
) -> HttpResponseBase:
    """Serve the request; a refusal is a problem, as the project's exception handler renders it.

    Args:
        adapter_class: the adapter for the view.
        view: the view.
        policy: the view's.
        request: the request.
        run: runs the view's handler.
    """
    adapter = adapter_class(view, request, run)
    adapter.policy = resolve(policy)
    try:
        return serve(adapter, adapter.policy, adapter.transactions)
    except IdempotencyError as error:
        if error.foreign:
            raise
        with adapter.apart():
            return problem(view, error)
    except Exception as error:  # noqa: BLE001  # the view's own, raised again
        raise shortened(error)  # noqa: B904  # its context is its own
