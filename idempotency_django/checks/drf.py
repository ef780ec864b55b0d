"""Checks of REST framework's views: those with the mixin, and those with object permissions.

The app imports this module if REST framework is installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning  # noqa: A004  # Django's name
from rest_framework.views import APIView

from ..conf import MIDDLEWARE
from ..drf.adapter import checks_objects, overrides_replay_check
from ..drf.views import IdempotentViewMixin
from ..http.declared import POLICIES, POLICY, is_exempt, is_marked, view_class_of
from ..http.replays import lookup_of
from ..policy import UNSAFE_METHODS, Policy
from .configuration import check_policy
from .inventory import Route, routes
from .views import of_frameworks


def check_drf_views() -> Iterator[CheckMessage]:
    """The views with the mixin, and those with object permissions that no replay can check."""
    served = [*routes()]  # which imports the views
    for view in dict.fromkeys(_subclasses(IdempotentViewMixin)):
        yield from _check_view(view)
    unseen = {each.view.cls for each in served if _takes_part(each) and not _is_seen(each)}
    for view_class in sorted(unseen, key=lambda view: (view.__module__, view.__qualname__)):
        if _is_unchecked(view_class):
            yield Warning(
                f"{view_class.__module__}.{view_class.__qualname__} has object permissions and an "
                "argument in its URL, but no get_object() that checks them before a replay.",
                hint=(
                    "Override check_idempotent_replay(self, request, record) of "
                    "IdempotentViewMixin, or give the view's policy check_replay=, and check the "
                    "permission there. If the view checks no object, override it with an empty "
                    "method."
                ),
                id="idempotency_django.W025",
            )


of_frameworks.append(check_drf_views)


def _is_seen(route: Route) -> bool:
    """Whether a replay can look up the object that a route names, if it names one."""
    if not (route.args or route.names):
        return True
    view = route.view.cls(**route.view.initkwargs)
    view.request, view.args = None, (None,) * route.args
    view.kwargs = dict.fromkeys(route.names)
    return lookup_of(view) is not None


def _takes_part(route: Route) -> bool:
    """Whether the view of a route is one of REST framework's, and protected."""
    view_class = view_class_of(route.view)
    if view_class is None or not issubclass(view_class, APIView) or is_exempt(route.view):
        return False
    if issubclass(view_class, IdempotentViewMixin):
        return True
    declares = any(is_marked(route.view, each) for each in (POLICY, POLICIES))
    is_chosen = declares or route.is_covered
    return MIDDLEWARE in settings.MIDDLEWARE and is_chosen


def _is_unchecked(view_class: Any) -> bool:
    if overrides_replay_check(view_class):
        return False
    if not any(hasattr(view_class, method.lower()) for method in UNSAFE_METHODS):
        return False
    policy = getattr(view_class, "idempotency_policy", Policy())
    if not isinstance(policy, Policy) or policy.resolved().check_replay is not None:
        return False
    return any(checks_objects(permission()) for permission in view_class.permission_classes)


def _check_view(view: Any) -> Iterator[CheckMessage]:
    name = f"{view.__module__}.{view.__qualname__}"
    if not issubclass(view, APIView):
        return  # a mixin of the project, for views with these actions
    yield from check_policy(view.idempotency_policy, f"{name}.idempotency_policy")
    policies = view.idempotency_policies
    if not isinstance(policies, Mapping):
        yield Error(
            f"{name}.idempotency_policies is a {type(policies).__name__}; it must be a dict of "
            "policies by action.",
            id="idempotency_django.E002",
        )
        return
    for action, policy in policies.items():
        if not hasattr(view, action):
            yield Error(
                f"{name}.idempotency_policies names {action!r}, which is not an action or a method "
                "of the view.",
                id="idempotency_django.E012",
            )
        yield from check_policy(policy, f"{name}.idempotency_policies[{action!r}]")


def _subclasses(of: type[Any]) -> Iterator[type[Any]]:
    for subclass in of.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
