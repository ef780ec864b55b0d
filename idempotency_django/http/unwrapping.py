"""Unwraps known decorators, and puts them on again; refuses unknown ones and frameworks.

The rule that a user can remember: ``@idempotent`` is the innermost decorator. A view that is
protected inside (``protected_part()``) may have anything around it. One that is protected from
outside may have the decorators of ``_KNOWN`` only, which then run for every request, before a
replay: each is made again, as its module makes it. Everything else that holds more than data may be
a check that must run before a replay, so it is refused, unless its author says that it is a
part of the view (``@part_of_view``). What a function looks up by name while it runs cannot be
seen: it counts as a part of the function.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial, update_wrapper, wraps
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, TypeVar
from uuid import UUID

from asgiref.sync import iscoroutinefunction
from django import VERSION
from django.contrib.auth.decorators import user_passes_test
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.transaction import Atomic
from django.utils.decorators import decorator_from_middleware, method_decorator
from django.utils.functional import Promise
from django.utils.module_loading import import_string
from django.views.decorators import cache, clickjacking, common, csrf, debug, http, vary

from ..policy import UNSAFE_METHODS, UNSET, Policy

PROTECTED: Final = "idempotency_protected"
POLICY: Final = "idempotency_policy"
POLICIES: Final = "idempotency_policies"
PART: Final = "idempotency_part_of_view"

Protect = Callable[[Any], Any]
AnyT = TypeVar("AnyT")


def _as_handler(function: Any) -> Any:
    @wraps(function)
    def handler(_: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return handler


_METHOD_DECORATOR: Final = "django.utils.decorators._multi_decorate"
_ATOMIC: Final = "contextlib.ContextDecorator"

_KNOWN: Final[dict[str, Callable[[dict[str, Any]], Protect]]] = {
    _ATOMIC: lambda held: held["self"],
    "django.contrib.admin.options.ModelAdmin": lambda held: held["self"].admin_site.admin_view,
    "django.contrib.admin.sites.AdminSite": lambda held: partial(
        held["self"].admin_view, cacheable=True
    ),
    "django.contrib.auth.decorators.user_passes_test": lambda held: user_passes_test(
        held["test_func"], held["login_url"], held["redirect_field_name"]
    ),
    _METHOD_DECORATOR: lambda held: method_decorator(held["decorators"][::-1]),
    "django.utils.decorators.make_middleware_decorator": lambda held: decorator_from_middleware(
        lambda _: held["middleware"]
    ),
    "django.views.decorators.cache.cache_control": lambda held: cache.cache_control(
        **held["kwargs"]
    ),
    "django.views.decorators.cache.never_cache": lambda _: cache.never_cache,
    "django.views.decorators.clickjacking.xframe_options_deny": (
        lambda _: clickjacking.xframe_options_deny
    ),
    "django.views.decorators.clickjacking.xframe_options_exempt": (
        lambda _: clickjacking.xframe_options_exempt
    ),
    "django.views.decorators.clickjacking.xframe_options_sameorigin": (
        lambda _: clickjacking.xframe_options_sameorigin
    ),
    "django.views.decorators.common.no_append_slash": lambda _: common.no_append_slash,
    "django.views.decorators.csrf.csrf_exempt": lambda _: csrf.csrf_exempt,
    "django.views.decorators.debug.sensitive_post_parameters": (
        lambda held: debug.sensitive_post_parameters(*held["parameters"])
    ),
    "django.views.decorators.debug.sensitive_variables": (
        lambda held: debug.sensitive_variables(*held["variables"])
    ),
    "django.views.decorators.http.condition": lambda held: http.condition(
        held["etag_func"], held["last_modified_func"]
    ),
    "django.views.decorators.http.require_http_methods": lambda held: http.require_http_methods(
        held["request_method_list"]
    ),
    "django.views.decorators.vary.vary_on_headers": lambda held: vary.vary_on_headers(
        *held["headers"]
    ),
    "drf_spectacular.drainage.isolate_view_method": lambda _: lambda method: method,
    "rest_framework.decorators.api_view": lambda _: _as_handler,
}
"""The known decorators, by the code of their wrapper: each is applied again, around another
function, with the values in the wrapper.
"""

if VERSION >= (6, 0):
    _CSP: Final = "django.views.decorators.csp._make_csp_decorator"
    _KNOWN[_CSP] = lambda held: import_string(_CSP)(
        held["config_attr_name"], held["config_attr_value"]
    )

_HELD_AS: Final = ("view_func", "viewfunc", "view", "func", "method")
"""The names by which they hold the function that they decorate."""

_CONDITIONAL: Final = "django.views.decorators.http"
_WRAPPING: Final = f"{__name__.rpartition('.')[0]}.wrapping"
_RUN_ONCE: Final = {f"{_WRAPPING}.{maker}" for maker in ("_sync", "_async", "_once")}
"""The makers of the functions that run once."""

_PATH_VIEW: Final = "ninja.operation.PathView"
"""The class with the operations of one route, which makes the function that the URL leads to."""

_AS_VIEW: Final = ("django.views.generic.base", "rest_framework.viewsets")

_OWNERS: Final = (
    "django.contrib.admin.options",
    "django.contrib.admin.sites",
    "django.views.generic.base",
)
"""The modules of classes whose bound methods are not wrappers: views, and the admin."""

_DATA: Final = (bytes, date, Decimal, Enum, float, int, str, time, timedelta, type(None), UUID)
_CONTAINERS: Final = (dict, list, tuple, set, frozenset)
_PARAMETERS: Final = "ninja.params.models"
"""Types that never run a view. Modules, classes, translated strings and what django-ninja declares
its arguments with don't, either."""


def mark_part_of_view(function: AnyT) -> AnyT:
    """The function, marked as a part of the view: it runs once with it, and not before a replay."""
    setattr(function, PART, function)  # itself, so that a copy of the mark does not count
    return function


def protect_innermost(view: Any, protect: Protect) -> Any:
    """The same view, with ``protect(function)`` in the place of its innermost function.

    What is protected inside stays as it is.

    Raises:
        ImproperlyConfigured: it is or contains an unknown object; the error contains the fix.
    """
    if _is_part(view) or is_made_by_as_view(view):
        return protect(view)
    known = known_decorator(view)
    if known and maker_of(view) == _METHOD_DECORATOR and PROTECTED in vars_of(view):
        protect_innermost(known[0], lambda function: function)  # @method_decorator(idempotent)
        return view
    if protected_part(view) is not None:
        return view
    if known is None or isinstance(view, MethodType | partial):
        if not _is_plain(view):
            raise _unknown(view)
        if known is None:
            return protect(view)
    inner, put_on = known
    again = put_on(protect_innermost(inner, protect))
    attributes = vars_of(again)
    for name, value in vars_of(view).items():
        attributes.setdefault(name, value)
    return again


def known_decorator(view: Any) -> tuple[Any, Protect] | None:
    """The function in a known decorator, bound method or partial, and what puts that on again."""
    if isinstance(view, MethodType):
        return view.__func__, lambda function: MethodType(function, view.__self__)
    if isinstance(view, partial):
        return view.func, lambda function: update_wrapper(
            partial(function, *view.args, **view.keywords), function
        )
    maker, held = maker_of(view), closure_of(view)
    inner = next((held[name] for name in _HELD_AS if callable(held.get(name))), None)
    if maker not in _KNOWN or inner is None:
        return None
    if maker == _ATOMIC and not isinstance(held["self"], Atomic):
        return None
    for helper in [value for name, value in held.items() if name.startswith("_")]:
        held = closure_of(helper) | held
    try:
        return inner, _KNOWN[maker](held)
    except KeyError:  # another version holds other values
        return None


def maker_of(view: Any) -> str:
    """The path of the outermost function, or the class, in which a function was made."""
    if not isinstance(view, FunctionType):
        return ""
    return f"{module_of(view)}.{view.__code__.co_qualname.split('.')[0]}"


def protected_part(view: Any, method: str = "") -> Any:
    """The innermost protected part of a view; ``None``: the view is not protected.

    A wrapper that does not say what it wraps is searched: its closure, its defaults, an object.

    Args:
        view: what a URL leads to, or a handler.
        method: of the request; ``"*"`` is any unsafe one, and without it handlers do not count.

    Returns:
        A function, or a class that protects all its handlers.
    """
    return _protected_part(view, method, set())


def _protected_part(view: Any, method: str, seen: set[int]) -> Any:
    if inspect.isclass(view):
        return view if getattr(view, PROTECTED, None) else None
    found, held = None, []
    while view is not None and id(view) not in seen:
        seen.add(id(view))
        if PROTECTED in vars_of(view):
            found = view
        if is_made_by_as_view(view):
            return _protected_class_or_handler(view, method, seen) or found
        inner = _inside(view)
        if inner is None or isinstance(view, MethodType | partial):
            held += _held(view)
        view = inner
    if found is None:
        parts = (part for value in held for part in (value, *_parts(value)) if callable(part))
        results = (_protected_part(part, method, seen) for part in parts)
        found = next((result for result in results if result is not None), None)
    return found


def _protected_class_or_handler(view: Any, method: str, seen: set[int]) -> Any:
    """The handler of a class-based view that is protected itself, or else the class if it is."""
    view_class, handlers = view_class_of(view), handlers_of(view)
    names = handlers.values() if method == "*" else [handlers[m] for m in handlers if m == method]
    # Two methods may have one handler, which is to be found for both.
    parts = [_protected_part(getattr(view_class, name), method, {*seen}) for name in names]
    if parts and all(part is not None for part in parts):
        return parts[0]
    return view_class if getattr(view_class, PROTECTED, None) else None


def transactions_around(view: Any) -> set[str]:
    """The databases on which Django opens a transaction around it, because of ATOMIC_REQUESTS."""
    databases = connections.settings.items()
    wanted = {using for using, options in databases if options["ATOMIC_REQUESTS"]}
    return wanted.difference(getattr(view, "_non_atomic_requests", ()))


def innermost(view: Any) -> Any:
    """The function below all decorators, known or not."""
    while (inner := _inside(view)) is not None:
        view = inner
    return view


def _inside(view: Any) -> Any:
    """The function that a decorator, a bound method or a partial says it wraps; ``None``: none."""
    if is_made_by_as_view(view):
        return None
    known = known_decorator(view)
    return known[0] if known else vars_of(view).get("__wrapped__")


def is_conditional_outside(view: Any) -> bool:
    """Whether Django's ``@condition`` is around a view's function and meets a retry first."""
    found = False
    while view is not None and maker_of(view) not in _RUN_ONCE and not _is_part(view):
        closure = closure_of(view)
        several = closure["decorators"] if maker_of(view) == _METHOD_DECORATOR else [view]
        found = found or any(map(_is_conditional, several))
        if not UNSAFE_METHODS.intersection(closure.get("request_method_list", UNSAFE_METHODS)):
            return False
        view = _inside(view)
    return found


def _is_conditional(view: Any) -> bool:
    """Whether it is of Django's ``@condition``, which ``@etag`` and ``@last_modified`` are, too."""
    is_function = isinstance(view, FunctionType) and module_of(view) == _CONDITIONAL
    return is_function and view.__code__.co_qualname.startswith("condition.")


def _is_part(view: Any) -> bool:
    """Whether all of it runs once: it is marked, or is ``@condition`` on the function itself.

    A condition holds before a change and not after it, so a retry gets the response first.
    """
    if _is_conditional(view) and (inner := _inside(view)) is not None:
        return _is_part(inner) or _is_plain(inner)
    function = getattr(view, "__func__", view)
    return vars_of(function).get(PART) is function


def _is_plain(view: Any) -> bool:
    """Whether a function, a bound method or a partial holds nothing but data."""
    if isinstance(view, FunctionType):
        if "__wrapped__" in vars_of(view):
            return False
    elif not isinstance(view, MethodType | partial):
        return False
    return all(map(_is_data, _held(view)))


def _held(view: Any) -> list[Any]:
    """The values that a function, a bound method, a partial or an object holds itself."""
    if isinstance(view, MethodType):
        bases = type(view.__self__).__mro__
        is_known = any(base.__module__ in _OWNERS for base in bases)
        return [] if is_known else [*_parts(view.__self__)]
    if isinstance(view, partial):
        return [*view.args, *view.keywords.values()]
    if not isinstance(view, FunctionType):
        return [*_parts(view)]
    closure = closure_of(view)
    closure.pop("__class__", None)  # of super()
    return [
        *closure.values(),
        *(view.__defaults__ or ()),
        *(view.__kwdefaults__ or {}).values(),
    ]


def _is_data(value: Any) -> bool:
    kind = type(value)  # isinstance() would make a lazy object do its work
    if issubclass(kind, type | ModuleType | Promise):
        return not hasattr(value, "as_view")
    if issubclass(kind, _CONTAINERS):
        return all(map(_is_data, _parts(value)))
    if any(base.__module__ == _PARAMETERS for base in kind.__mro__):
        return True
    return issubclass(kind, _DATA) and all(map(_is_data, vars_of(value).values()))


def _parts(value: Any) -> Iterator[Any]:
    """The values in a container, or the attributes of an object."""
    if issubclass(type(value), type | ModuleType | FunctionType | MethodType | partial):
        return
    for part in gc.get_referents(value):
        yield from part.values() if part is vars_of(value) else [part]


def _unknown(view: Any) -> ImproperlyConfigured:
    inner = innermost(view)
    place = "the function that does the work" if inner is view else f"{name_of(inner)} itself"
    return ImproperlyConfigured(
        f"{name_of(view)} is wrapped by, or contains, a decorator, function or object that "
        "idempotency_django does not know. It may have to run before a replay, for example to "
        f"check permissions. Put @idempotent on {place}, below all decorators. Or leave the view "
        "unprotected: remove its protection, or add @idempotency_exempt. If it checks nothing, "
        f"mark what the decorator returns, also one of a package: part_of_view({name_of(view)}). "
        "All of it then runs once."
    )


# What can be seen of a view's function from outside.


def is_made_by_as_view(view: Any) -> bool:
    """Whether ``as_view()`` made the function."""
    return module_of(view) in _AS_VIEW and "cls" in closure_of(view)


def view_class_of(view: Any) -> type | None:
    """The class that ``as_view()`` made the view of, if it did."""
    found = getattr(view, "cls", None) or getattr(view, "view_class", None)
    return found if isinstance(found, type) else None


def initkwargs_of(view: Any) -> dict[str, Any]:
    """The attributes that ``as_view()`` gives each instance of a class-based view."""
    given = getattr(view, "view_initkwargs", None) or getattr(view, "initkwargs", None)
    return given if isinstance(given, dict) else {}


def handlers_of(view: Any) -> dict[str, str]:
    """The unsafe methods that a class-based view handles, and the names of its handlers."""
    view_class, actions = view_class_of(view), getattr(view, "actions", None)
    own = getattr(view_class, "http_method_names", None)
    handled = initkwargs_of(view).get("http_method_names", own)
    names = {
        method: method.lower() if actions is None else actions.get(method.lower())
        for method in sorted(UNSAFE_METHODS)
        if not isinstance(handled, list | tuple | set | frozenset) or method.lower() in handled
    }
    return {method: name for method, name in names.items() if name and hasattr(view_class, name)}


def operations_of(view: Any) -> list[Any]:
    """The operations of a view of django-ninja; empty: it is another view."""
    inner = innermost(view)
    is_path_view = maker_of(inner) == _PATH_VIEW and "self" in closure_of(inner)
    return list(closure_of(inner)["self"].operations) if is_path_view else []


def part_for(view: Any, method: str) -> Any:
    """The view's part for one method: the function of django-ninja's operation, or all of it."""
    return next((each.view_func for each in operations_of(view) if method in each.methods), view)


def admitted(view: Any) -> frozenset[str]:
    """The methods that ``require_http_methods()`` and its like admit; empty: any method."""
    found: list[frozenset[str]] = []
    while view is not None:
        if module_of(view) == "django.views.decorators.http":
            found += map(frozenset, filter(None, [closure_of(view).get("request_method_list")]))
        view = getattr(view, "__wrapped__", None)
    return frozenset.intersection(*found) if found else frozenset()


def closure_of(view: Any) -> dict[str, Any]:
    """The variables of a function's closure, by name."""
    if not isinstance(view, FunctionType):
        return {}
    contents = {}
    for name, cell in zip(view.__code__.co_freevars, view.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty cell
            contents[name] = cell.cell_contents
    return contents


def vars_of(view: Any) -> dict[str, Any]:
    """The attributes that an object has of its own."""
    return getattr(view, "__dict__", {})


def module_of(view: Any) -> str:
    """The module of a function's code, which ``functools.wraps`` cannot change."""
    names = getattr(view, "__globals__", None)
    return str(names.get("__name__", "") if names is not None else type(view).__module__)


def name_of(view: Any) -> str:
    """The name of a view in an error."""
    if inspect.isclass(view):
        return dotted_name(view)
    made_of = closure_of(view).get("cls") if is_made_by_as_view(view) else None
    if made_of is not None:
        return name_of(made_of)
    code = getattr(view, "__code__", None)  # whose name functools.wraps cannot change, either
    return f"{module_of(view)}.{code.co_qualname if code else type(view).__qualname__}"


def dotted_name(view: Any) -> str:
    """The dotted name of a class or a function; an ``@api_view`` has that of its function."""
    is_renamed = view.__qualname__.rpartition(".")[2] != view.__name__
    return f"{view.__module__}.{view.__name__ if is_renamed else view.__qualname__}"


def cached_on(view: Any, where: str, make: Callable[[], Any]) -> Any:
    """The result of ``make()``, cached on the view, so that both end together.

    Args:
        view: a function, or a method, which its function keeps it for.
        where: the attribute. A copy of it, as ``functools.wraps`` makes, does not count.
        make: makes it.
    """
    attributes = getattr(view, "__dict__", {})
    known = attributes.get(where)
    if known is None or known[0] is not view:
        known = attributes[where] = (view, make())
    return known[1]


FRAMEWORKS: Final = {
    "adrf": "adrf",
    "ariadne": "Ariadne",
    "ariadne_django": "Ariadne",
    "graphene_django": "Graphene",
    "jsonrpc": "a JSON-RPC framework",
    "modernrpc": "django-modern-rpc",
    "ninja": "django-ninja",
    "ninja_extra": "django-ninja-extra",
    "restless": "restless",
    "spyne": "Spyne",
    "strawberry": "Strawberry",
    "strawberry_django": "Strawberry",
    "tastypie": "Tastypie",
}
"""Frameworks with their own authentication and responses, by their package."""

_UNPROTECTED: Final = (
    "To leave the view unprotected, add @idempotency_exempt, or list the paths that the middleware "
    "protects in IDEMPOTENCY['MIDDLEWARE_PROTECTS']."
)


def validate_framework(view: Any) -> None:
    """Refuse the views of a framework without an adapter here.

    Raises:
        ImproperlyConfigured: it is such a view; the error names the framework and the ways out.
    """
    framework = framework_of(view)
    if framework is not None:
        if operations_of(view):
            names = " and ".join(name_of(innermost(each.view_func)) for each in operations_of(view))
            raise ImproperlyConfigured(
                f"{names} is a view of {framework}, which the middleware cannot protect. Put "
                f"@idempotent on the function, below @api.post(…). {_UNPROTECTED}"
            )
        raise ImproperlyConfigured(
            f"{name_of(innermost(view))} is a view of {framework}, for which idempotency_django "
            "has no adapter, so it cannot identify the caller. Protect the work itself with "
            f"idempotent_call(). {_UNPROTECTED}"
        )


def framework_of(view: Any) -> str | None:
    """The framework of the view, if there is no adapter for it here."""
    return next((FRAMEWORKS[name] for name in _packages(view) if name in FRAMEWORKS), None)


def is_from(view: Any, modules: Collection[str]) -> bool:
    """Whether the view, or a base of its class, is from one of the modules or one below it."""
    return any(
        module == prefix or module.startswith(f"{prefix}.")
        for module in _modules(view)
        for prefix in modules
    )


def _packages(view: Any) -> Iterator[str]:
    return (module.partition(".")[0] for module in _modules(view))


def _modules(view: Any) -> Iterator[str]:
    """The modules that a view's innermost function, or its class, is from."""
    inner = innermost(view)
    view_class = inner if inspect.isclass(inner) else getattr(inner, "cls", None)
    view_class = view_class or getattr(inner, "view_class", None)
    if view_class is None:
        yield module_of(inner)
        owner = getattr(view, "__self__", None)
        view_class = None if owner is None else type(owner)
    for base in getattr(view_class, "__mro__", ()):
        yield base.__module__


EXEMPT: Final = "idempotency_exempt"
INBOX: Final = "idempotency_inbox"
"""The attribute of a view that receives webhooks, and stores each of them once."""

ViewFunction = Callable[..., Any]


def is_marked(view: Any, mark: str) -> bool:
    """Whether a view, or the class it was made of, carries a mark."""
    return bool(getattr(view, mark, False) or getattr(view_class_of(view), mark, False))


def is_exempt(view: Any) -> bool:
    """Whether ``@idempotency_exempt`` is on a view or its class; a base's is on that base alone."""
    return EXEMPT in vars_of(view) or EXEMPT in vars_of(view_class_of(view))


def is_async(view: Any) -> bool:
    """Whether the view is a coroutine function, or a class-based view of coroutine functions."""
    view_class = view if inspect.isclass(view) else view_class_of(view)
    return iscoroutinefunction(view) or bool(getattr(view_class, "view_is_async", False))


def policy_of(view: ViewFunction, method: str = "") -> Any:
    """The policy that a view declares, in ``idempotency_policy`` or ``idempotency_policies``.

    Args:
        view: what the URL leads to.
        method: of the request; without it, policies by action are not considered.

    Returns:
        The policy; ``None``: the view is not protected; ``UNSET``: it declares no policy.
    """
    view_class = view_class_of(view)
    given = initkwargs_of(view)
    declared = getattr(view, POLICY, UNSET)
    if declared is UNSET:
        declared = given.get(POLICY, getattr(view_class, POLICY, UNSET))
    policies = given.get(POLICIES, getattr(view_class, POLICIES, None))
    if policies and not isinstance(policies, Mapping):
        raise ImproperlyConfigured(
            f"idempotency_policies of {view!r} is a {type(policies).__name__}; it must be a "
            "dict of policies by action."
        )
    if policies and method:
        name = (getattr(view, "actions", None) or {}).get(method.lower(), method.lower())
        declared = policies.get(name, declared)
    return declared if declared is UNSET else checked(declared, view)


def checked(declared: Any, view: Any) -> Policy | None:
    """The policy that a view declares, unless it is something else.

    Raises:
        ImproperlyConfigured: it is neither a policy nor ``None``.
    """
    if declared is None or isinstance(declared, Policy):
        return declared
    raise ImproperlyConfigured(
        f"idempotency_policy of {view!r} is a {type(declared).__name__}; it must be a Policy or "
        "None."
    )
