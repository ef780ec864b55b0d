"""The system check of REST framework's views whose objects no replay can look up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Warning  # noqa: A004  # Django's name
from django.urls import URLPattern, get_resolver
from rest_framework.views import APIView

from .drf import IdempotentViewMixin, has_hook
from .drf_objects import checks_objects
from .middleware import IdempotencyMiddleware
from .objects import lookup_of
from .policy import Policy
from .policy_fields import UNSAFE_METHODS
from .protection import is_exempt

_OURS = f"{IdempotencyMiddleware.__module__}.{IdempotencyMiddleware.__qualname__}"


def check_objects() -> Iterator[CheckMessage]:
    """The views with object permissions that a replay cannot check."""
    if not getattr(settings, "ROOT_URLCONF", None):
        return
    views = {
        callback.cls
        for callback, args, kwargs in _with_arguments(get_resolver().url_patterns)
        if _takes_part(callback) and not _is_looked_up(callback, args, kwargs)
    }
    for view_class in sorted(views, key=lambda view: (view.__module__, view.__qualname__)):
        if _is_unchecked(view_class):
            yield Warning(
                f"{view_class.__module__}.{view_class.__qualname__} has object permissions and an "
                "argument in its URL, but no get_object() that a replay could call.",
                hint=(
                    "Override check_idempotent_replay(self, request, record) of "
                    "IdempotentViewMixin, or give the view's policy check_replay=, and check the "
                    "permission there. If the view checks no object, let it do nothing."
                ),
                id="idempotency_django.W025",
            )


def _with_arguments(
    patterns: Any, args: int = 0, kwargs: frozenset[str] = frozenset()
) -> Iterator[tuple[Any, int, frozenset[str]]]:
    """What the URLs with arguments lead to, how many of them have no name, and the names."""
    for each in patterns:
        regex = each.pattern.regex
        names = kwargs | frozenset(regex.groupindex)
        unnamed = args + regex.groups - len(regex.groupindex)
        if not isinstance(each, URLPattern):
            yield from _with_arguments(each.url_patterns, unnamed, names)
        elif unnamed or names:
            yield each.callback, 0 if names else unnamed, names  # as Django's resolver does


def _is_looked_up(callback: Any, args: int, kwargs: frozenset[str]) -> bool:
    """Whether a replay can call ``get_object()`` with such arguments."""
    view = callback.cls(**callback.initkwargs)
    view.request, view.args, view.kwargs = None, (None,) * args, dict.fromkeys(kwargs)
    return lookup_of(view) is not None


def _takes_part(view: Any) -> bool:
    """Whether a view is one of REST framework's, and protected."""
    view_class = getattr(view, "cls", None)
    if view_class is None or not issubclass(view_class, APIView) or is_exempt(view):
        return False
    return issubclass(view_class, IdempotentViewMixin) or _OURS in settings.MIDDLEWARE


def _is_unchecked(view_class: Any) -> bool:
    if has_hook(view_class):
        return False
    if not any(hasattr(view_class, method.lower()) for method in UNSAFE_METHODS):
        return False
    policy = getattr(view_class, "idempotency_policy", Policy())
    if not isinstance(policy, Policy) or policy.resolved().check_replay is not None:
        return False
    return any(checks_objects(permission()) for permission in view_class.permission_classes)
