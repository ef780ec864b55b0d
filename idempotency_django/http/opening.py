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
from functools import partial, update_wrapper
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db.transaction import Atomic
from django.views.generic import View

from .atomic_requests import OwnedTransactions

PROTECTED: Final = "idempotency_protected"
POLICY: Final = "idempotency_policy"
POLICIES: Final = "idempotency_policies"

Protect = Callable[[Any], Any]

_AS_VIEW: Final = frozenset({"django.views.generic.base", "rest_framework.viewsets"})
# What Django's decorators call the function that they decorate.
_OF_OTHERS: Final = {"drf_spectacular.drainage": "method", "rest_framework.decorators": "func"}
_HELD_AS: Final = frozenset({"view_func", "viewfunc", "view", "func", "method"})


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


def is_as_view(view: Any) -> bool:
    """Whether the function is the one that ``as_view()`` makes."""
    return module_of(view) in _AS_VIEW and "cls" in closure_of(view)


def held_as(view: Any) -> str | None:
    """The variable in which a known decorator holds what it decorates; ``None``: it is not one."""
    closure, module = closure_of(view), module_of(view)
    if module.startswith("django."):
        names = [name for name in _HELD_AS & closure.keys() if callable(closure[name])]
        return names[0] if len(names) == 1 else None
    if _OF_OTHERS.get(module, "") in closure:
        return _OF_OTHERS[module]
    if module == "contextlib" and isinstance(closure.get("self"), Atomic):
        return "func"
    return None


def with_variable(function: FunctionType, name: str, content: Any) -> FunctionType:
    """The same function, with other content in a variable of its closure."""
    names = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    cells = tuple(CellType(content) if free == name else cell for free, cell in names)
    code, module = function.__code__, function.__globals__
    again = FunctionType(code, module, function.__name__, function.__defaults__, cells)
    again.__kwdefaults__ = function.__kwdefaults__
    wrapped = function.__dict__.get("__wrapped__")
    update_wrapper(again, function)
    again.__dict__["__wrapped__"] = wrapped
    return again


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


def closure_of(view: Any) -> dict[str, Any]:
    """The variables of a function's closure, by name."""
    if not isinstance(view, FunctionType):
        return {}
    contents = {}
    for name, cell in zip(view.__code__.co_freevars, view.__closure__ or (), strict=True):
        try:
            contents[name] = cell.cell_contents
        except ValueError:  # an empty cell
            continue
    return contents


def vars_of(view: Any) -> dict[str, Any]:
    """The attributes that an object has of its own."""
    return getattr(view, "__dict__", {})


def module_of(view: Any) -> str:
    """Where a function's code is from; ``functools.wraps`` cannot change that."""
    names = getattr(view, "__globals__", None)
    return str(names.get("__name__", "") if names is not None else type(view).__module__)


def name_of(view: Any) -> str:
    """The name of a view in an error."""
    if inspect.isclass(view):
        return f"{view.__module__}.{view.__qualname__}"
    made_of = closure_of(view).get("cls") if is_as_view(view) else None
    if made_of is not None:
        return name_of(made_of)
    code = getattr(view, "__code__", None)  # whose name functools.wraps cannot change, either
    return f"{module_of(view)}.{code.co_qualname if code else type(view).__qualname__}"


def kept(view: Any, where: str, make: Callable[[], Any]) -> Any:
    """What ``make()`` returns, made once and kept with the view, so that both end together.

    Args:
        view: a function, or a method, which its function keeps it for.
        where: the attribute. A copy of it, as ``functools.wraps`` makes, does not count.
        make: makes it.
    """
    attributes = vars_of(view)
    found = attributes.get(where)
    if found is None or found[0] is not view:
        found = attributes[where] = (view, make())
    return found[1]
