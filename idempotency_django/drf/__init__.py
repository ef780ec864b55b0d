"""Django REST framework: ``IdempotentViewMixin`` makes a view safe to retry.

It comes before ``APIView`` in the class's bases, and works on ``APIView``, generic views, viewsets
and their ``@action`` methods. Authentication, permissions and throttles run first, for every
request. Then the handler runs once per operation, and its answer is finalised and rendered in the
transaction that stores it. A caller without permission for the object in the URL gets no replay.

::

    class ChargeViewSet(IdempotentViewMixin, viewsets.ModelViewSet):
        idempotency_policy = Policy(required=True)
        idempotency_policies = {"capture": PAYMENT, "preview": None}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, Final

from django.http import Http404, HttpRequest, HttpResponse, QueryDict
from django.http.response import HttpResponseBase
from django.utils.datastructures import MultiValueDict
from rest_framework.exceptions import APIException, ParseError
from rest_framework.parsers import FileUploadParser, FormParser, MultiPartParser
from rest_framework.request import Empty, Request
from rest_framework.response import Response
from rest_framework.views import APIView

from ..engine.context import ExecutionContext
from ..errors import IdempotencyError, ResponseNotStored
from ..http.atomic_requests import OwnedTransactions, RequestTransactions, request_transactions
from ..http.bodies import (
    as_file,
    body_of,
    body_that_django_ignores,
    form_of,
    is_readable,
    raw_body_of,
    rewind,
)
from ..http.handlers import ensure_reached, place
from ..http.messages import (
    caller_of,
    key_header,
    operation_name,
    principal_of,
    problem_of,
    rendered,
    response_of,
    status_of,
)
from ..http.objects import check_object, has_object
from ..http.serving import Adapter, refuse_result, serve, unclaimed
from ..http.status import described, record_of
from ..http.wrapping import add_framework
from ..policy import Policy
from ..policy.invocation import Body, Form, Hashed, Invocation, LazyInvocation, Parsed
from ..policy.validators import UNSAFE_METHODS
from ..records import Payload, Record
from .forms import key_in_form, with_keys
from .objects import refuse_checks_of_objects
from .responses import (
    ProblemRenderer,
    StoredResponse,
    is_json,
    is_page,
    rendered_by,
    without_page,
)


class IdempotencyAPIException(APIException):
    """What a custom ``EXCEPTION_HANDLER`` sees of an :exc:`~.errors.IdempotencyError`.

    ``detail`` holds the members of the problem, and ``error`` the error itself. DRF's own handler
    turns ``wait`` into ``Retry-After``.
    """

    def __init__(self, error: IdempotencyError) -> None:
        super().__init__(error.detail, error.slug)
        self.error = error
        self.status_code = status_of(error)
        self.detail: Any = problem_of(error)
        self.wait = error.retry_after


class OptionallyIdempotentRequest(Request):
    """:class:`idempotency_django.http.requests.OptionallyIdempotentRequest` for REST framework.

    Attributes:
        idempotency: the attempt that runs; ``None``: the request has no key, or takes no part.
    """

    idempotency: ExecutionContext | None


class IdempotentRequest(OptionallyIdempotentRequest):
    """:class:`idempotency_django.http.requests.IdempotentRequest` for REST framework.

    Attributes:
        idempotency: the attempt that runs.
    """

    idempotency: ExecutionContext


class IdempotentViewMixin:  # see below
    # Described above: for a view without a docstring, OpenAPI generators would publish the
    # docstring of this base.

    idempotency_policy: ClassVar[Policy | None] = Policy()
    """The view's policy; ``None``: the view is not protected."""

    idempotency_policies: ClassVar[Mapping[str, Policy | None]] = {}
    """Policies by action (viewsets) or lower-case method (other views); they come first."""

    idempotency_protected = "mixin"
    # Set by as_view(), which takes over Django's ATOMIC_REQUESTS.
    idempotency_left_out: OwnedTransactions | None = None
    _idempotency_transactions: RequestTransactions | None = None

    @classmethod
    def as_view(cls, *args: Any, **initkwargs: Any) -> Any:
        owned = OwnedTransactions()
        view = super().as_view(*args, **initkwargs, idempotency_left_out=owned)  # type: ignore[misc]
        owned.update(iter(getattr(view, "_non_atomic_requests", ())))
        view._non_atomic_requests = owned
        return view

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if self.idempotency_left_out is None:  # not through as_view(): Django's affair
            return self._dispatch(request, *args, **kwargs)
        with request_transactions(self.idempotency_left_out) as transactions:
            self._idempotency_transactions = transactions
            return self._dispatch(request, *args, **kwargs)

    def _dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        response: HttpResponseBase = super().dispatch(request, *args, **kwargs)  # type: ignore[misc]
        ensure_reached(self, request, response)
        return response

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)  # type: ignore[misc]
        unclaimed(request._request)
        policy = self.get_idempotency_policy() if request.method in UNSAFE_METHODS else None
        if policy is None:
            self._idempotency_reached = True  # it is not protected
            return
        # dispatch() looks the handler up next. What it finds on the view itself runs after
        # everything that initial() checks, in subclasses too.
        place(self, request, partial(self._serve_once, policy))

    def _serve_once(
        self, policy: Policy, request: Request, run: Callable[[], HttpResponseBase]
    ) -> HttpResponseBase:
        adapter = _MixinAdapter(self, request, run)
        return _answer(adapter, policy, self._idempotency_transactions)

    def get_renderers(self) -> list[Any]:
        return [with_keys(renderer) for renderer in super().get_renderers()]  # type: ignore[misc]

    # For subclasses to override.

    def get_idempotency_policy(self) -> Policy | None:
        """The policy of this request; ``None``: the request is not protected."""
        view: Any = self
        name = getattr(view, "action", None) or view.request.method.lower()
        return self.idempotency_policies.get(name, self.idempotency_policy)

    def get_idempotency_key(self) -> str | None:
        """The key as the client sent it; ``None``: it sent none.

        The default reads the key header, or the hidden field in the forms of the browsable API.
        """
        view: Any = self
        header = key_header(view.request._request)
        return key_in_form(view.request) if header is None else header

    def get_idempotency_scope(self) -> str | None:
        """The scope that the key is unique in; ``None``: the policy's."""
        return None

    def check_idempotent_replay(self, request: Request, record: Record) -> None:
        """Raise to refuse a replay to a caller whom the handler would refuse now.

        It is called before every replay, after everything that ``initial()`` checks. If the URL
        names an object, the default calls ``get_object()``: the object must be in the view's
        queryset, and its permissions are checked. An object that no longer exists is not a reason
        to refuse. A ``get_object()`` with parameters gets the URL's arguments.

        Raises:
            PermissionDenied: or ``Http404``, or any other exception. The caller gets the answer
                that the project's exception handler makes of it.
        """
        check_object(self, record)

    def rebuild_idempotent_response(self, record: Record) -> HttpResponseBase:
        """The answer of a record whose body was not kept, for example from the model's rows.

        Raises:
            ResponseNotStored: the default. The 409 says that the operation was executed.
        """
        raise ResponseNotStored


class IdempotencyStatusView(APIView):
    """The same as :class:`idempotency_django.views.IdempotencyStatusView`, for REST framework.

    It authenticates callers as the project's other views do. If the views that answer 202 have
    other ``authentication_classes``, override them here.
    """

    def get(self, request: Request, token: str, *args: Any, **kwargs: Any) -> Response:
        """The status of an operation, and its answer if there is one."""
        record = record_of(token, principal_of(request.user, request.auth))
        if record is None:
            raise Http404
        return Response(described(record), headers={"Cache-Control": "no-store"})


class _DRFAdapter(Adapter):
    """One request within a DRF view."""

    def __init__(self, view: Any, request: Request, handler: Callable[[], Any]) -> None:
        super().__init__(request._request)
        self.policy: Policy
        self.transactions: RequestTransactions | None = None
        self.view = view
        self._request = request
        self._handler = handler

    @property
    def request(self) -> Request:
        return self._request

    def invocation(self, policy: Policy) -> Invocation:
        request = self.http_request
        return LazyInvocation(
            name=operation_name(request),
            **caller_of(request, policy, self.request.user, self.request.auth),
            method=request.method or "",
            path=request.path,
            query=request.META.get("QUERY_STRING", ""),
            media_type=(request.content_type or "").lower(),
            body=self._body,  # type: ignore[arg-type]  # read when it is asked for
            header=self.header(),
            request=self.request,
        )

    def respond(self) -> HttpResponseBase:
        claimed = getattr(self.http_request, "idempotency", None) is not None
        if claimed and not self.checks_replays():
            refuse_checks_of_objects(self.view)
        return rendered(self._finalized(self._handler()))

    def checks_replays(self) -> bool:
        """Whether a replay is refused to callers who lost their permission for an object."""
        return has_object(self.view) or self.policy.check_replay is not None

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
        with self._apart():
            return self._finalized(self.view.handle_exception(error))

    def _apart(self) -> AbstractContextManager[None]:
        return self.transactions.apart() if self.transactions else nullcontext()

    def _finalized(self, response: HttpResponseBase) -> HttpResponseBase:
        """Finalise now, and prevent DRF from finalising the same response again."""
        finalize = self.view.finalize_response

        def once(request: Request, given: HttpResponseBase, *args: Any, **kwargs: Any) -> Any:
            return given if given is finished else finalize(request, given, *args, **kwargs)

        finished = finalize(self.request, response, *self.view.args, **self.view.kwargs)
        self.view.finalize_response = once
        return finished  # type: ignore[no-any-return]

    def _body(self) -> Body:
        """What was sent, as the view's parser has it; the view can read it again."""
        unseen = body_that_django_ignores(self.http_request)
        if unseen is not None:
            return unseen
        request: Any = self.request  # some of whose attributes its types say may be missing
        if not is_readable(self.http_request):  # an authentication has looked into a form
            return self._parsed(None)
        parser: Any = request.negotiator.select_parser(request, request.parsers)
        if type(parser) in (MultiPartParser, FormParser):
            return body_of(self.http_request)
        raw = raw_body_of(self.http_request)
        if parser is None:  # the view reads the stream itself, or refuses
            return raw
        if isinstance(parser, FileUploadParser):
            name = parser.get_filename(request.stream, request.content_type, request.parser_context)
            return Form({}, (as_file(raw, name or "", request.content_type or ""),))
        try:
            return self._parsed(raw)
        except _UNPARSED:
            # The view meets it itself, if it looks: REST framework would show it an empty body now.
            request._data = request._files = request._full_data = Empty
            return raw
        finally:
            rewind(self.http_request)

    def _parsed(self, raw: bytes | Hashed | None) -> Body:
        data, files = self.request.data, self.request.FILES
        if not isinstance(files, MultiValueDict):  # a parser of files only makes a plain dict
            files = MultiValueDict({name: [file] for name, file in files.items()})
        if isinstance(data, QueryDict):
            return form_of(data, files)
        return form_of(MultiValueDict(), files) if files else Parsed(data, raw)


_UNPARSED: Final = (ParseError, RecursionError, LookupError)
"""What a body that is none raises: broken, nested too deep, of a charset that nobody knows."""


class _MixinAdapter(_DRFAdapter):
    """One request within a view that has the mixin, and therefore its hooks."""

    def header(self) -> str | None:
        key: str | None = self.view.get_idempotency_key()
        return key

    def checks_replays(self) -> bool:
        return has_hook(type(self.view)) or super().checks_replays()

    def authorize(self, record: Record, policy: Policy) -> None:
        Adapter.authorize(self, record, policy)
        result = self.view.check_idempotent_replay(self.request, record)
        refuse_result(result, f"check_idempotent_replay() of {type(self.view).__qualname__}")

    def scope(self) -> str | None:
        scope: str | None = self.view.get_idempotency_scope()
        return scope

    def rebuild(self, record: Record, policy: Policy) -> HttpResponseBase:
        if policy.rebuild is not None:
            return super().rebuild(record, policy)
        response: HttpResponseBase = self.view.rebuild_idempotent_response(record)
        return response


def serve_within(request: Request, policy: Policy, handler: Callable[[], Any]) -> HttpResponseBase:
    """Serve a request whose DRF view already runs: for ``@idempotent`` on its handlers."""
    view: APIView = request.parser_context["view"]
    transactions = getattr(view, "_idempotency_transactions", None)
    adapter = _MixinAdapter if isinstance(view, IdempotentViewMixin) else _DRFAdapter
    return _answer(adapter(view, request, handler), policy, transactions)


def _answer(
    adapter: _DRFAdapter, policy: Policy, transactions: RequestTransactions | None
) -> HttpResponseBase:
    adapter.transactions = transactions
    adapter.policy = policy.resolved()
    try:
        return serve(adapter, adapter.policy, transactions)
    except IdempotencyError as error:
        if error.foreign:
            raise
        with adapter._apart():
            return _problem(adapter.view, error)


def _problem(view: Any, error: IdempotencyError) -> HttpResponseBase:
    """The problem as the project's exception handler renders it, or in its own media type."""
    response: HttpResponseBase = view.handle_exception(IdempotencyAPIException(error))
    if getattr(response, "data", None) != problem_of(error):
        return response
    return rendered_by(ProblemRenderer(), view, response)


def has_hook(view_class: type) -> bool:
    """Whether the project checks replays of a view itself."""
    default = IdempotentViewMixin.check_idempotent_replay
    return getattr(view_class, "check_idempotent_replay", default) is not default


add_framework(APIView, IdempotentViewMixin, Request, serve_within)
