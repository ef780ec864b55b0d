"""REST framework's object permissions, if a replay cannot check them by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from rest_framework.permissions import BasePermission
from rest_framework.request import Request


def check_checked(
    checks_replays: Callable[[], bool],
    check: Callable[[Request, Any], None],
    view: Any,
    request: Request,
    obj: Any,
) -> None:
    """Check permissions on an object, but refuse to do so if no replay would check them.

    Args:
        checks_replays: says whether a replay is refused to callers who lost their permission.
        check: the view's own ``check_object_permissions``.
        view: the view.
        request: the request.
        obj: the object.
    """
    if not checks_replays() and any(map(checks_objects, view.get_permissions())):
        name = f"{type(view).__module__}.{type(view).__qualname__}"
        raise ImproperlyConfigured(
            f"{name} checks the caller's permission on an object ({type(obj).__qualname__}) "
            "that a replay cannot look up: get_object() does not find it by the URL. "
            "Override check_idempotent_replay(self, request, record) in the view, or give "
            "its policy check_replay=, and check the permission there."
        )
    check(request, obj)


def checks_objects(permission: Any) -> bool:
    """Whether a permission, or one that it is composed of, checks objects."""
    parts = [getattr(permission, name) for name in ("op1", "op2") if hasattr(permission, name)]
    if parts:
        return any(map(checks_objects, parts))
    own = getattr(type(permission), "has_object_permission", None)
    return own is not BasePermission.has_object_permission
