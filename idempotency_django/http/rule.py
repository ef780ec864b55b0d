"""The rule: what stands above ``@idempotent`` runs on every request, what stands below runs once.

A check of the caller must run before a replay. So ``@idempotent`` is directly above the function
that does the work, and the rule refuses what may hide a check below it. It knows the decorators
that decide nothing about callers; everything else that holds another callable is refused. The same
rule judges the handlers of a protected class, and what the middleware protects, more strictly: a
function that was made in another function may be a decorator's.

A decorator that keeps the view in a list or in a registry cannot be recognised.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any, Final

from asgiref.sync import iscoroutinefunction
from django.db.transaction import Atomic

from .declared import (
    BUILT_IN,
    BY_DECORATOR,
    PROTECTED,
    dotted_name,
    handlers_of,
    has_own_dispatch,
    innermost,
    is_rest_framework,
    module_of,
    modules_of,
    name_of,
    operations_of,
    part_for,
    variables_of,
    view_class_of,
)

_DECIDE_NOTHING: Final = {
    *(f"django.views.decorators.{m}" for m in ("cache", "common", "csrf", "debug", "http", "vary")),
    "drf_spectacular.drainage",
    *(f"idempotency_django.contrib.concurrency.{m}" for m in ("conditions", "drf")),
}
"""The modules whose decorators decide nothing about callers, and leave nothing on a response that a
replay would lose; ``@condition`` aside.
"""

_TRACERS: Final = ("ddtrace.contrib.", "newrelic.hooks.")
"""The packages that wrap views in proxies at runtime, to measure them."""

_BEFORE_THE_WORK: Final = {"dispatch", "initial", "setup"}


def protected_function(view: Any) -> Any:
    """The function or handler that runs once already, or is around one that does; or ``None``."""
    inner = opened(view)
    layers = (view, inner, *variables_of(inner).values())
    marks = (each for each in layers if getattr(each, PROTECTED, None) == BY_DECORATOR)
    return next(marks, None)


def protected_part(view: Any, method: str) -> Any:
    """What runs once already in the view of a URL: a function, a handler, or its whole class."""
    view_class = view_class_of(view)
    if view_class is None:
        return protected_function(part_for(view, method))
    name = handlers_of(view).get(method)
    handler = inspect.getattr_static(view_class, name) if name else None
    return protected_function(handler) or (view_class if hasattr(view_class, PROTECTED) else None)


def opened(function: Any) -> Any:
    """What is below everything that decides nothing about callers."""
    inner = function
    while inner is not None:
        function, inner = inner, _inside(inner)
    return function


def _inside(function: Any) -> Any:
    """The function below one layer that decides nothing about callers; ``None``: there is none."""
    if type(function) is not FunctionType:  # isinstance() believes what a proxy says of itself
        is_proxy = hasattr(type(function), "_self_wrapper")
        return function.__wrapped__ if is_proxy and _is_tracer(function._self_wrapper) else None
    module, held = module_of(function), variables_of(function)
    if module == "rest_framework.decorators":
        return held.get("func")  # of an @api_view
    wrapped = vars(function).get("__wrapped__")
    if all(each is not wrapped for each in held.values()):  # wraps() of something else
        return None
    if module == "contextlib":
        return wrapped if type(held.get("self")) is Atomic else None
    is_condition = function.__code__.co_qualname.startswith("condition.")
    passes = module in _DECIDE_NOTHING and not is_condition
    return wrapped if passes or _is_tracer(function) else None


def _is_tracer(wrapper: Any) -> bool:
    return type(wrapper) is FunctionType and module_of(wrapper).startswith(_TRACERS)


def objection_to(function: Any, *, from_outside: bool = False) -> str:
    """Why a function cannot run once per operation, and what to do; empty: it can.

    Args:
        function: what is decorated; a handler, or a plain view that the middleware protects.
        from_outside: its author has not decorated it.
    """
    if problem := _objection_to_framework(function):
        return problem
    view_class = function if isinstance(function, type) else view_class_of(function)
    if view_class is not None:
        return (
            f"@idempotent is on {dotted_name(view_class)}, which is a class, or what as_view() or "
            "@api_view made. Put it directly above the method that does the work, such as post(), "
            "or below @api_view, directly above the function. Or give the class an "
            "idempotency_policy, and let IdempotentViewMixin (of REST framework) or "
            "IdempotencyMiddleware protect it."
        )
    inner = opened(function)
    name = name_of(inner)
    if type(inner) is not FunctionType:
        return (
            f"{name} is not a function, so it may check the caller where nothing can see it. Put "
            "@idempotent directly above the function that does the work, below all decorators."
        )
    if "__wrapped__" in vars(inner):
        decorator = inner.__code__.co_qualname.partition(".")[0]
        return (
            f"The decorator {decorator}() of {module_of(inner)} would not run before a replay, and "
            "it may check the caller. Put @idempotent below it, directly above the function "
            f"{name_of(innermost(inner))}."
        )
    if module_of(inner) == "django.utils.decorators":  # the function that it is tried on
        return (
            "Write @idempotent directly above the method, without method_decorator(), and below "
            "all other decorators."
        )
    return _objection_to_code(inner, name, from_outside=from_outside)


def _objection_to_code(function: FunctionType, name: str, *, from_outside: bool) -> str:
    """:func:`objection_to` for a function without decorators: its place, and what it holds."""
    owner, _, own_name = function.__code__.co_qualname.rpartition(".")
    if own_name in _BEFORE_THE_WORK and owner and not owner.endswith(">"):
        return (
            f"@idempotent is on {name}, where callers are checked. Put it on the method that does "
            "the work, such as post()."
        )
    held = variables_of(function)
    held.pop("__class__", None)  # of super()
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    hidden = next((each for each in (*held.values(), *defaults) if _may_be_a_view(each)), None)
    if hidden is not None:
        return (
            f"{name} holds {name_of(hidden)} in a variable or a default, as a decorator without "
            "functools.wraps does, and such a decorator may check the caller. Put @idempotent "
            "below it, directly above the function that does the work. If it is not a decorator, "
            "let it call a function of its module."
        )
    if from_outside and (called := _view_below(function)):
        return (
            f"{name} calls {called}, a view of its own, and either may check the caller. Put "
            "@idempotent directly above the function that does the work, or add "
            "@idempotency_exempt if that is protected already."
        )
    if from_outside and "<" in function.__code__.co_qualname:
        return (
            f"{name} was made within another function, as decorators make theirs. Put @idempotent "
            "directly above the function that does the work; if it is there already, use "
            "functools.wraps in the decorator above it. A function that is not a decorator's is "
            "best defined at the top of a module or of a class."
        )
    return ""


def objection_to_view(view: Any, method: str) -> str:
    """Why the middleware cannot protect a method of what a URL leads to.

    Empty: it can, or the view does not have the method.
    """
    view_class: Any = view_class_of(view)
    if view_class is None:
        has_method = not operations_of(view) or part_for(view, method) is not view
        return objection_to(view, from_outside=True) if has_method else ""
    name = handlers_of(view).get(method)
    if name is not None:
        return objection_to_handler(view_class, name)
    if not has_own_dispatch(view_class):
        return ""
    return _objection_to_framework(view) or (
        f"{name_of(view)} overrides dispatch() and has no post(), put(), patch() or delete() for "
        f"{method} requests. Let such a method do the work. Or protect the work itself with "
        "idempotent_call(), and leave the class unprotected with @idempotency_exempt."
    )


def objection_to_handler(view_class: Any, name: str) -> str:
    """Why a handler of a class-based view cannot run once per operation; empty: it can."""
    handler = inspect.getattr_static(view_class, name)
    if protected_function(handler) is not None:
        return ""
    above = (vars(base).get(name) for base in view_class.__mro__)
    if any(protected_function(each) is not None for each in above if each is not None):
        return (
            f"{name_of(handler)} overrides a handler with @idempotent, and may check the caller "
            f"before it calls it. Put @idempotent directly above it, or let {name}() of the base "
            "call another method that does the work."
        )
    if is_rest_framework(view_class) and iscoroutinefunction(getattr(view_class, name)):
        return (
            f"{dotted_name(view_class)} is an async view of REST framework, for which "
            "idempotency_django has no adapter. Make its handlers sync, or protect the work in "
            "them with aidempotent_call()."
        )
    problem = _objection_to_framework(view_class) or objection_to(handler, from_outside=True)
    return problem or _objection_below(view_class, name, opened(handler))


@lru_cache(maxsize=1024)  # the middleware asks at every request
def _objection_below(view_class: Any, name: str, handler: FunctionType) -> str:
    """Why the methods that a handler passes its work to cannot run once; empty: they can.

    Those are the same method of a base, by ``super()`` or by the base's name, and what a
    framework's handler calls, such as the ``create()`` of generic views: people decorate them like
    handlers.
    """
    below = [name] if {"super", name} & set(handler.__code__.co_names) else []
    below += _called_by_framework(handler)
    for each in below:  # which grows
        for base in view_class.__mro__:
            method = vars(base).get(each)
            if not callable(method) or isinstance(method, type) or method is handler:
                continue
            if problem := objection_to(method):
                return problem
            below += [other for other in _called_by_framework(method) if other not in below]
    return ""


def _called_by_framework(function: Any) -> list[str]:
    """The names that a framework's own function uses, but those of lookups, which do no work."""
    if type(function) is not FunctionType or not module_of(function).startswith(BUILT_IN):
        return []
    return [name for name in function.__code__.co_names if not name.startswith("get_")]


# A handler, as dispatch() of a view's instance would call it.


def own_function(view: Any, handler: Any) -> Any:
    """The function of a handler that is a method of the instance; ``None``: it is none."""
    inner = handler if type(handler) is MethodType else opened(handler)
    return inner.__func__ if type(inner) is MethodType and inner.__self__ is view else None


remembered_protection = lru_cache(maxsize=1024)(protected_function)  # for every request


@lru_cache(maxsize=1024)  # likewise
def objection_to_method(view_class: Any, name: str, function: Any) -> str:
    """:func:`objection_to_handler` for the handler of an instance.

    Args:
        view_class: the class of the instance.
        name: the name of the handler in the class.
        function: the function of the handler; see :func:`own_function`.
    """
    if function is None or opened(function) is not opened(getattr(view_class, name, None)):
        return (
            f"{dotted_name(view_class)} replaces its handler {name}() for single requests, maybe "
            "for those of some callers. Let the handler decide, or put @idempotent on each "
            "function that does the work."
        )
    return objection_to_handler(view_class, name)


def _view_below(function: FunctionType) -> str:
    """The name of another view that the function calls, if that may check the caller; or empty."""
    names = function.__code__.co_names
    makes_views = "as_view" in names
    used = ((name, function.__globals__.get(name)) for name in names)
    return next((name for name, value in used if _is_view(value, makes_views)), "")


def _is_view(value: Any, makes_views: bool) -> bool:
    if issubclass(type(value), type):  # isinstance() would make a lazy object do its work
        return makes_views and hasattr(value, "as_view")
    is_function = type(value) is FunctionType
    return is_function and (PROTECTED in vars(value) or view_class_of(value) is not None)


def _may_be_a_view(value: Any) -> bool:
    kind = type(value)  # isinstance() would make a lazy object do its work
    return hasattr(value, "as_view") if issubclass(kind, type) else callable(value)


_FRAMEWORKS: Final = frozenset(
    "ariadne ariadne_django graphene_django modernrpc ninja ninja_extra strawberry "
    "strawberry_django tastypie".split()
)
"""The packages of frameworks that authenticate their callers in the view itself."""


def _objection_to_framework(view: Any) -> str:
    """The way out for a view of a framework without an adapter; empty: it is another view."""
    packages = (module.partition(".")[0] for module in modules_of(view))
    framework = next((package for package in packages if package in _FRAMEWORKS), None)
    if framework is None:
        return ""
    functions = [name_of(innermost(each.view_func)) for each in operations_of(view)]
    return (
        f"{' and '.join(functions) or name_of(view)} is a view of {framework}, which the "
        "middleware cannot protect. Put @idempotent on the function, below @api.post(…) of "
        "django-ninja, or protect the work itself with idempotent_call(). To leave the view "
        "unprotected, add @idempotency_exempt, or list the paths that the middleware protects in "
        "IDEMPOTENCY['MIDDLEWARE_PROTECTS']."
    )
