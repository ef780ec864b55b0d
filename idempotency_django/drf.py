"""Django REST framework: ``IdempotentViewMixin`` makes a view safe to retry.

It comes before ``APIView`` in the class's bases, and works on ``APIView``, generic views, viewsets
and their ``@action`` methods. Authentication, permissions and throttles run first, for every
request. Then the handler runs once per operation, and its response is finalised and rendered in the
transaction that stores it. A caller without permission for the object in the URL gets no replay.

::

    class ChargeViewSet(IdempotentViewMixin, viewsets.ModelViewSet):
        idempotency_policy = Policy(required=True)
        idempotency_policies = {"capture": PAYMENT, "preview": None}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, QueryDict
from django.http.response import HttpResponseBase
from django.utils.datastructures import MultiValueDict

from .engine import reraise
from .errors import IdempotencyError
from .http.declared import checked, handlers_of, name_of, policy_of
from .http.invocations import body_of, form_of, invocation_of, unreadable
from .http.replays import check_object, defining_module, has_object
from .http.responses import error_body, media_type, render, status_of
from .http.rule import objection_to_handler
from .http.serving import Adapter, refuse_result
from .http.wrapping import adapters, log_unclaimed, replace_handler
from .lazy import extra
from .policy import UNSAFE_METHODS, Policy
from .policy.fingerprints import is_json, media_type_of
from .policy.invocation import Body, Invocation, Parsed
from .stores.records import Record

with extra("drf"):
    from rest_framework.exceptions import APIException
    from rest_framework.permissions import BasePermission
    from rest_framework.renderers import BaseRenderer
    from rest_framework.request import Request
    from rest_framework.response import Response
    from rest_framework.views import APIView

__all__ = ["IdempotencyAPIException", "IdempotentViewMixin", "problem"]


class IdempotencyAPIException(APIException):
    """An :exc:`~.errors.IdempotencyError`, as a custom ``EXCEPTION_HANDLER`` gets it.

    ``detail`` holds the members of the problem, or of the dialect's error, and ``error`` the error
    itself. DRF's own handler turns ``wait`` into ``Retry-After``.
    """

    def __init__(self, error: IdempotencyError) -> None:
        super().__init__(error.detail, error.slug)
        self.error = error
        self.status_code = status_of(error)
        self.detail: Any = error_body(error)
        self.wait = error.retry_after


def problem(view: Any, error: IdempotencyError) -> HttpResponseBase:
    """The problem as the project's exception handler renders it, or in its own media type."""
    exception = IdempotencyAPIException(error)
    response: Any = view.handle_exception(exception)
    if getattr(response, "data", None) == exception.detail:
        response.accepted_renderer = renderer = ProblemRenderer()
        response.accepted_media_type = renderer.media_type
        response.renderer_context = view.get_renderer_context()
        response.render()
    return response  # type: ignore[no-any-return]


class ProblemRenderer(BaseRenderer):
    """Problems have a media type of their own (RFC 9457), and one form for all frameworks."""

    charset = None

    def __init__(self) -> None:
        self.media_type = media_type()

    def render(self, data: Any, *args: Any, **kwargs: Any) -> bytes:
        return (data if isinstance(data, str) else json.dumps(data)).encode()


class StoredResponse(Response):
    """A response from stored bytes, with their parsed content in its ``data``.

    Args:
        content: the bytes.
        status: the status.
        headers: the headers.
    """

    def __init__(self, content: bytes, *, status: int, headers: dict[str, str]) -> None:
        super().__init__(status=status, headers=headers)
        del self.data  # created again on access
        self.content = content

    @cached_property
    def data(self) -> Any:
        """The data in the bytes, if they are JSON; else ``None``."""
        if not self.content or not _is_json(self.items()):
            return None
        return json.loads(self.content)


def _is_json(headers: Iterable[tuple[str, str]]) -> bool:
    types = (value for name, value in headers if name.lower() == "content-type")
    return is_json(media_type_of(next(types, "")))


def checks_objects(permission: Any) -> bool:
    """Whether a permission, or one that it is composed of, checks objects."""
    parts = [getattr(permission, name) for name in ("op1", "op2") if hasattr(permission, name)]
    if parts:
        return any(map(checks_objects, parts))
    own = getattr(type(permission), "has_object_permission", None)
    return own is not BasePermission.has_object_permission


def overrides_replay_check(view_class: type) -> bool:
    """Whether the project checks replays of a view itself."""
    return bool(defining_module(view_class, "check_idempotent_replay"))


class DRFAdapter(Adapter):
    """One request within a DRF view."""

    response_class = StoredResponse

    def __init__(self, request: Request, run: Callable[[], Any], instance: Any = None) -> None:
        self.http_request = request._request
        self.request = request
        self.method = self.http_request.method or ""
        self.run = run
        self.view = request.parser_context["view"]

    def invocation(self) -> Invocation:
        http, own = self.http_request, self.request
        return invocation_of(
            http,
            self.policy,
            own=own,
            auth=own.auth,
            authorization=None if own.auth is None or self._reads_authorization() else "",
            body=partial(body_of, http, self._parsed),
        )

    def _reads_authorization(self) -> bool:
        """Whether the request's authentication is by the header ``Authorization``."""
        authenticator: Any = self.request.successful_authenticator
        challenge = authenticator and authenticator.authenticate_header(self.request)
        sent: str = self.http_request.META.get("HTTP_AUTHORIZATION", "")
        return sent.partition(" ")[0].lower() == str(challenge or "").partition(" ")[0].lower()

    def respond(self) -> HttpResponseBase:
        view = self.view
        if getattr(self.http_request, "idempotency", None):
            check = view.check_object_permissions
            view.check_object_permissions = partial(self._check_permissions, check)
        return render(self._finalized(self.run()), self.http_request)

    def _check_permissions(self, check: Callable[[Request, Any], None], *args: Any) -> None:
        """Check permissions on an object, but refuse to do so if no replay would check them."""
        view = self.view
        if not self._checks_replays() and any(map(checks_objects, view.get_permissions())):
            name = f"{type(view).__module__}.{type(view).__qualname__}"
            raise ImproperlyConfigured(
                f"{name} checks the caller's permission on an object "
                f"({type(args[-1]).__qualname__}) that a replay cannot load, because get_object() "
                "does not find it by the URL. Override check_idempotent_replay(self, request, "
                "record) in the view, or give its policy check_replay=, and check the permission "
                "there."
            )
        check(*args)

    def _checks_replays(self) -> bool:
        """Whether a replay is refused to callers who lost their permission for an object."""
        own_check = overrides_replay_check(type(self.view))
        return own_check or self.policy.check_replay is not None or has_object(self.view)

    def authorize(self, record: Record) -> None:
        super().authorize(record)
        check = getattr(self.view, "check_idempotent_replay", None)
        if check is None:
            check_object(self.view, record)
        else:
            name = f"check_idempotent_replay() of {type(self.view).__qualname__}"
            refuse_result(check(self.request, record), name)

    def recover(self, error: Exception) -> HttpResponseBase:
        # Not rendered here: under ATOMIC_REQUESTS the exception handler may have marked the
        # transaction for rollback, and a renderer may ask the database for something.
        try:
            response = self.view.handle_exception(error)
        except Exception:
            self.view.handle_exception = reraise  # for dispatch(), which would ask once more
            raise
        return self._finalized(response)

    def _finalized(self, response: HttpResponseBase) -> HttpResponseBase:
        """Finalise now, and prevent DRF from finalising the same response again."""
        finalize = self.view.finalize_response

        def skip(request: Request, given: HttpResponseBase, *args: Any, **kwargs: Any) -> Any:
            return given if given is finished else finalize(request, given, *args, **kwargs)

        finished = finalize(self.request, response, *self.view.args, **self.view.kwargs)
        self.view.finalize_response = skip
        return finished  # type: ignore[no-any-return]

    def problem(self, error: IdempotencyError) -> HttpResponseBase:
        return problem(self.view, error)

    def _parsed(self) -> Body:
        """What the view's parser has made of the body already."""
        data, files = self.request.data, self.request.FILES
        if not (files or isinstance(data, QueryDict)):
            if not is_json(str(self.http_request.content_type).lower()):
                raise unreadable(self.http_request)
            return Parsed(data)
        if not isinstance(files, MultiValueDict):  # a parser of files only makes a plain dict
            files = MultiValueDict({name: [file] for name, file in files.items()})
        return form_of(data if isinstance(data, QueryDict) else MultiValueDict(), files)


class IdempotentViewMixin:
    # It has no docstring: for a view without a docstring, OpenAPI generators would publish the
    # docstring of this base.

    idempotency_policy: ClassVar[Policy | None] = Policy()
    """The view's policy. With ``None``, the view is not protected."""

    idempotency_policies: ClassVar[Mapping[str, Policy | None]] = {}
    """Policies by action (viewsets) or lower-case method (other views); they come first."""

    idempotency_protected = "mixin"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        order = cls.__mro__
        if APIView in order and order.index(APIView) < order.index(IdempotentViewMixin):
            raise ImproperlyConfigured(
                f"{name_of(cls)} has IdempotentViewMixin after APIView in its bases, so it "
                f"would not be protected. Put the mixin first: class {cls.__name__}"
                "(IdempotentViewMixin, …)."
            )

    @classmethod
    def as_view(cls, *args: Any, **initkwargs: Any) -> Any:
        if not issubclass(cls, APIView):
            raise ImproperlyConfigured(
                f"{name_of(cls)} has IdempotentViewMixin, but is no view of REST framework. "
                "Put @idempotent on its handlers, or let IdempotencyMiddleware protect it."
            )
        view = super().as_view(*args, **initkwargs)  # type: ignore[misc]
        for method, name in handlers_of(view).items():
            problem = objection_to_handler(cls, name)
            if problem and policy_of(view, method):
                raise ImproperlyConfigured(problem)
        return view

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        response: HttpResponseBase = super().dispatch(request, *args, **kwargs)  # type: ignore[misc]
        if not hasattr(request, "idempotency"):
            log_unclaimed(type(self), request, response)
        return response

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)  # type: ignore[misc]
        http_request: Any = request._request
        unsafe = http_request.method in UNSAFE_METHODS
        policy = checked(self.get_idempotency_policy(), type(self)) if unsafe else None
        if policy is None:
            http_request.idempotency = getattr(http_request, "idempotency", None)
        else:
            # dispatch() looks the handler up next. What it finds on the view itself runs after
            # everything that initial() checks, in subclasses too.
            replace_handler(self, request, policy)

    # For subclasses to override.

    def get_idempotency_policy(self) -> Policy | None:
        """The policy of this request; ``None``: the request is not protected."""
        view: Any = self
        name = getattr(view, "action", None) or view.request.method.lower()
        return self.idempotency_policies.get(name, self.idempotency_policy)

    def check_idempotent_replay(self, request: Request, record: Record) -> None:
        """Raise to refuse a replay to a caller whom the handler would refuse now.

        It is called before every replay, after everything that ``initial()`` checks. If the URL
        names an object, the default calls ``get_object()``: the object must be in the view's
        queryset, and its permissions are checked. An object that no longer exists is not a reason
        to refuse. A ``get_object()`` that takes arguments is not called.

        Raises:
            PermissionDenied: or ``Http404``, or any other exception. The caller gets the response
                that the project's exception handler makes of it.
        """
        check_object(self, record)


adapters.append((Request, DRFAdapter))
