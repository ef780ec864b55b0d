"""REST framework's object permissions, if a replay cannot check them by itself."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from rest_framework.permissions import BasePermission
from rest_framework.request import Request


def refuse_checks_of_objects(view: Any) -> None:
    """Refuse a handler that checks permissions on an object that no replay would check."""
    check = view.check_object_permissions

    def checked(request: Request, obj: Any) -> None:
        if any(map(checks_objects, view.get_permissions())):
            name = f"{type(view).__module__}.{type(view).__qualname__}"
            raise ImproperlyConfigured(
                f"{name} checks the caller's permission on an object ({type(obj).__qualname__}) "
                "that a replay cannot look up: get_object() does not find it by the URL. "
                "Override check_idempotent_replay(self, request, record) in the view, or give "
                "its policy check_replay=, and check the permission there."
            )
        check(request, obj)

    view.check_object_permissions = checked


def checks_objects(permission: Any) -> bool:
    """Whether a permission, or one that it is composed of, checks objects."""
    parts = [getattr(permission, name) for name in ("op1", "op2") if hasattr(permission, name)]
    if parts:
        return any(map(checks_objects, parts))
    own = getattr(type(permission), "has_object_permission", None)
    return own is not BasePermission.has_object_permission
