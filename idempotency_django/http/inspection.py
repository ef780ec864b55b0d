"""What can be seen of a view's function from outside: its closure, where it is from, its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import update_wrapper
from types import CellType, FunctionType
from typing import Any, Final

from django.db.transaction import Atomic

_AS_VIEW: Final = frozenset({"django.views.generic.base", "rest_framework.viewsets"})


# What Django's decorators call the function that they decorate.
_OF_OTHERS: Final = {"drf_spectacular.drainage": "method", "rest_framework.decorators": "func"}


_HELD_AS: Final = frozenset({"view_func", "viewfunc", "view", "func", "method"})


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
    attributes = getattr(view, "__dict__", {})
    known = attributes.get(where)
    if known is None or known[0] is not view:
        known = attributes[where] = (view, make())
    return known[1]
