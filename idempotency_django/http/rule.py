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
    handlers_of,
    has_own_dispatch,
    innermost,
    is_rest_framework,
    module_of,
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
    view_class = function if isinstance(function, type) else view_class_of(function)
    if view_class is not None:
        return (
            f"@idempotent is on {name_of(view_class)}, which is a class, or what as_view() or "
            "@api_view made. Put it directly above the method that does the work, such as post(), "
            "or below @api_view, directly above the function. Or give the class an "
            "idempotency_policy, and let IdempotentViewMixin (of REST framework) or "
            "IdempotencyMiddleware protect it. What neither can, idempotent_call() does."
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
    owner, _, own_name = inner.__code__.co_qualname.rpartition(".")
    if own_name in _BEFORE_THE_WORK and owner and not owner.endswith(">"):
        return (
            f"@idempotent is on {name}, where callers are checked. Put it on the method that does "
            "the work, such as post()."
        )
    hidden = _hidden_in(inner, from_outside=from_outside)
    return hidden and (
        f"{name} {hidden}, which may check the caller. Put @idempotent directly above the function "
        "that does the work, below all decorators; if it is there, use functools.wraps in the "
        "decorator above it, or add @idempotency_exempt. If there is no decorator, define the "
        "function at the top of a module or of a class, and let it call others of its module."
    )


def _hidden_in(function: FunctionType, *, from_outside: bool) -> str:
    """How a function may hide another view, as a decorator without ``functools.wraps`` does."""
    held = variables_of(function)
    held.pop("__class__", None)  # of super()
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for value in (*held.values(), *defaults):
        if _may_be_a_view(value):
            return f"holds {name_of(value)} in a variable or a default"
    names = function.__code__.co_names if from_outside else ()
    for name in names:
        if _is_view(function.__globals__.get(name), makes_views="as_view" in names):
            return f"calls {name}, a view of its own"
    if from_outside and "<" in function.__code__.co_qualname:
        return "was made within another function, as decorators make theirs"
    return ""


def _is_view(value: Any, *, makes_views: bool) -> bool:
    if issubclass(type(value), type):  # isinstance() would make a lazy object do its work
        return makes_views and hasattr(value, "as_view")
    is_function = type(value) is FunctionType
    return is_function and (PROTECTED in vars(value) or view_class_of(value) is not None)


def _may_be_a_view(value: Any) -> bool:
    kind = type(value)  # isinstance() would make a lazy object do its work
    return hasattr(value, "as_view") if issubclass(kind, type) else callable(value)


def objection_to_view(view: Any, method: str) -> str:
    """Why the middleware cannot protect a method of what a URL leads to.

    Empty: it can, or the view does not have the method.
    """
    view_class, part = view_class_of(view), part_for(view, method)
    if operations_of(view) and part is view:
        return ""
    if framework := _framework_of(view):
        return (
            f"{name_of(innermost(part))} is a view of {framework}, which the "
            "middleware cannot protect. Put @idempotent on the function, below @api.post(…) of "
            "django-ninja, or protect the work itself with idempotent_call(). To leave the view "
            "unprotected, add @idempotency_exempt, or list the paths that the middleware protects "
            "in IDEMPOTENCY['MIDDLEWARE_PROTECTS']."
        )
    if view_class is None:
        return objection_to(view, from_outside=True)
    name = handlers_of(view).get(method)
    if name is not None:
        return objection_to_handler(view_class, name)
    if not has_own_dispatch(view_class):
        return ""
    return (
        f"{name_of(view)} overrides dispatch() and has no post(), put(), patch() or delete() for "
        f"{method} requests. Let such a method do the work. Or protect the work itself with "
        "idempotent_call(), and leave the class unprotected with @idempotency_exempt."
    )


_FRAMEWORKS: Final = frozenset(
    "ariadne ariadne_django graphene_django modernrpc ninja ninja_extra strawberry "
    "strawberry_django tastypie".split()
)
"""The packages of frameworks that authenticate their callers in the view itself."""


def _framework_of(view: Any) -> str:
    """The framework without an adapter that a view is of; empty: it is another view."""
    inner = innermost(view)
    owner = view_class_of(view) or type(getattr(inner, "__self__", None))
    modules = (module_of(inner), *(base.__module__ for base in owner.__mro__))
    packages = (module.partition(".")[0] for module in modules)
    return next((package for package in packages if package in _FRAMEWORKS), "")


def objection_to_handler(view_class: Any, name: str) -> str:
    """Why a handler of a class-based view cannot run once per operation; empty: it can."""
    handler = inspect.getattr_static(view_class, name)
    if protected_function(handler) is not None:
        return ""
    if is_rest_framework(view_class) and iscoroutinefunction(getattr(view_class, name)):
        return (
            f"{name_of(view_class)} is an async view of REST framework, for which "
            "idempotency_django has no adapter. Make its handlers sync, or protect the work in "
            "them with aidempotent_call()."
        )
    problem = objection_to(handler, from_outside=True)
    return problem or _objection_below(view_class, name, opened(handler))


@lru_cache(maxsize=1024)  # the middleware asks at every request
def _objection_below(view_class: Any, name: str, handler: FunctionType) -> str:
    """Why the methods that a handler passes its work to cannot run once; empty: they can.

    Those are the same method of a base, by ``super()`` or by the base's name, and what frameworks'
    handlers call, such as the ``create()`` of generic views: people decorate them like handlers.
    """
    below = [name] if {"super", name} & set(handler.__code__.co_names) else []
    below += _called_by(handler, view_class)
    for each in below:  # which grows
        for base in view_class.__mro__:
            method = vars(base).get(each)
            if not callable(method) or isinstance(method, type) or method is handler:
                continue
            if protected_function(method) is not None:
                return (
                    f"{name_of(handler)} calls {each}() of a base, which has @idempotent, and may "
                    "check the caller before that. Put @idempotent directly above it, or let the "
                    "method of the base call another one that does the work."
                )
            if problem := objection_to(method):
                return problem
            below += [other for other in _called_by(method, view_class) if other not in below]
    return ""


def _called_by(function: Any, view_class: Any) -> list[str]:
    """The methods that a function may pass its work to, by name. Lookups do none.

    A framework's own function may call any method so. Of those that a project's function calls,
    the ones that a framework's base has, too, and that are not protected themselves.
    """
    if type(function) is not FunctionType:
        return []
    names = [name for name in function.__code__.co_names if not name.startswith("get_")]
    if module_of(function).startswith(BUILT_IN):
        return names
    theirs = [vars(base) for base in view_class.__mro__ if base.__module__.startswith(BUILT_IN)]
    return [
        name
        for name in names
        if any(name in each for each in theirs)
        and protected_function(getattr(view_class, name)) is None
    ]


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
            f"{name_of(view_class)} replaces its handler {name}() for single requests, maybe "
            "for those of some callers. Let the handler decide, or put @idempotent on each "
            "function that does the work."
        )
    return objection_to_handler(view_class, name)
