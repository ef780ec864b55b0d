"""Opens known decorators: they run for every request, around a function that runs once.

A decorator may call its view through anything: an attribute, a default argument, a helper. A
decorator that is not known here is refused: a wrong guess would leave the view unprotected, or
replay an answer to a caller whom the decorator would have refused. A view that holds a function of
the project for its work looks the same, so it is refused, too. What a function looks up by name
while it runs cannot be seen: it counts as a part of the function.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.views.generic import View

from .atomic_requests import OwnedTransactions
from .inspection import closure_of, held_as, is_as_view, module_of, name_of, vars_of, with_variable

PROTECTED: Final = "idempotency_protected"
POLICY: Final = "idempotency_policy"
POLICIES: Final = "idempotency_policies"
_PART: Final = "idempotency_part_of_view"

Protect = Callable[[Any], Any]


def part_of_view(function: Any) -> Any:
    """The function, marked as a part of the view: it runs once with it, and not before a replay."""
    setattr(function, _PART, function)  # itself, so that a copy of the mark does not count
    return function


def opened(view: Any, protect: Protect) -> Any:
    """The same view, with ``protect(function)`` in the place of its innermost function.

    Known are Django's decorators (``method_decorator`` and ``decorator_from_middleware`` included),
    ``transaction.atomic``, REST framework's ``@api_view``, ``functools.partial`` and bound methods.
    What is protected already stays as it is.

    Raises:
        ImproperlyConfigured: another decorator is on it; the error names the function inside it.
    """
    if PROTECTED in getattr(view, "__dict__", ()):
        return view
    if vars_of(view).get(_PART) is view:
        return protect(view)
    if isinstance(view, MethodType):
        if not isinstance(view.__self__, View):  # which holds what we gave it
            _refuse(view, [*filter(_may_be_a_view, _parts(view.__self__))])
        return MethodType(opened(view.__func__, protect), view.__self__)
    if isinstance(view, partial):
        _refuse(view, _suspects((*view.args, *view.keywords.values())))
        inner = opened(view.func, protect)
        again = partial(inner, *view.args, **view.keywords)
        again.__dict__.update(vars_of(view))
        return _marked(again, inner)
    name = None if is_as_view(view) else held_as(view)
    if name is not None:
        return _around(opened(closure_of(view)[name], protect), view, name)
    if is_as_view(view):
        return protect(view)
    inside = _inside(view)
    if inside and all(PROTECTED in vars_of(suspect) for suspect in inside):
        return _around(inside[0], view)
    _refuse(view, inside)
    return protect(view)


def protected_part(view: Any) -> Any:
    """The outermost part of a view, decorators seen through, that is protected; ``None``: none."""
    while PROTECTED not in vars_of(view):
        name = None if is_as_view(view) else held_as(view)
        if name is None:
            return None
        view = closure_of(view)[name]
    return view


def innermost(view: Any) -> Any:
    """What all decorators wrap, known or not, as far as they tell."""
    while True:
        if isinstance(view, MethodType):
            view = view.__func__
        elif isinstance(view, partial):
            view = view.func
        elif is_as_view(view):
            return view
        elif (name := held_as(view)) is not None:
            view = closure_of(view)[name]
        elif (inner := vars_of(view).get("__wrapped__")) is not None:
            view = inner
        else:
            return view


def _around(protected: Any, decorated: FunctionType, name: str = "") -> Any:
    again = with_variable(decorated, name, protected)
    again.__dict__["__wrapped__"] = protected
    return _marked(again, protected)


def _marked(again: Any, protected: Any) -> Any:
    """A decorator with the marks of what it is around, where Django and we look for them."""
    for mark in (PROTECTED, POLICY):
        if hasattr(protected, mark):
            setattr(again, mark, getattr(protected, mark))
    owned = getattr(protected, "_non_atomic_requests", None)
    if isinstance(owned, OwnedTransactions):
        owned.update(iter(getattr(again, "_non_atomic_requests", ())))
        again._non_atomic_requests = owned
    return again


def _inside(view: Any) -> list[Any]:
    """What a function may be a decorator around.

    Raises:
        ImproperlyConfigured: it is a decorator that is not known, or an object.
    """
    if "__wrapped__" in vars_of(view):
        raise _unknown(view, innermost(view))
    if isinstance(view, FunctionType):
        defaults = (*(view.__defaults__ or ()), *(view.__kwdefaults__ or {}).values())
        return _suspects((*closure_of(view).values(), *defaults))
    if module_of(view).startswith("django."):
        return []
    held = [*filter(_may_be_a_view, _parts(view))]
    raise _unknown(view, innermost(held[0]) if held else None)


def _suspects(values: Iterable[Any]) -> list[Any]:
    return [part for value in values for part in (value, *_parts(value)) if _may_be_a_view(part)]


def _refuse(view: Any, suspects: list[Any]) -> None:
    if suspects:
        raise _unknown(view, innermost(suspects[0]))


def _parts(value: Any) -> Iterator[Any]:
    """What a container or an object holds itself."""
    kind = type(value)  # isinstance() would make a lazy object do its work
    if issubclass(kind, dict):
        yield from value.values()
    elif issubclass(kind, list | tuple | set | frozenset):
        yield from value
    elif not issubclass(kind, type | ModuleType | FunctionType | MethodType | partial):
        yield from vars_of(value).values()
        members = (member for base in kind.__mro__ for member in vars(base).values())
        for slot in filter(inspect.ismemberdescriptor, members):
            with suppress(AttributeError):  # an empty slot
                yield slot.__get__(value)


def _may_be_a_view(value: Any) -> bool:
    """Whether a decorator may be around it: a function of the project's that takes an argument.

    Of functions of Django, REST framework and the standard library, only what takes a ``request``.
    """
    given = 0  # arguments that it has already
    while (kind := type(value)) is not FunctionType:
        called = kind.__call__ if callable(value) else None
        if kind is MethodType:
            value, given = value.__func__, given + 1
        elif issubclass(kind, partial):
            value, given = value.func, given + len(value.args)
        elif isinstance(called, FunctionType) and not issubclass(kind, type):
            value, given = called, given + 1
        else:
            return False
    if is_as_view(value):
        return True
    if (name := held_as(value)) is not None:
        return _may_be_a_view(closure_of(value)[name])
    code = value.__code__
    if not _is_known(module_of(value)):
        anything = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
        return bool(anything) or code.co_argcount + code.co_kwonlyargcount > given
    if "__wrapped__" in vars_of(value):
        return _may_be_a_view(value.__wrapped__)
    return "request" in code.co_varnames[: min(2, code.co_argcount)]


def _is_known(module: str) -> bool:
    # A project may have an app "profile" or "calendar", but its views are in a module below that.
    return module in sys.stdlib_module_names or module.startswith(("django.", "rest_framework."))


def _unknown(decorator: Any, inner: Any) -> ImproperlyConfigured:
    place = f"on {name_of(inner)} itself" if inner else "on a function that calls it"
    return ImproperlyConfigured(
        f"{name_of(decorator)} is or has a decorator that idempotency_django does not know, so it "
        f"cannot tell whether that would run before a replay. Put @idempotent {place}, below all "
        "decorators. Or put the decorator of a method on with method_decorator(). Or leave the "
        "view unprotected: with @idempotency_exempt, or without the mixin. If it is no decorator, "
        "protect a function that calls it by its name in the module: all of that runs once."
    )
