"""Methods of django-fsm-2 that run once, on the locked row.

::

    class Order(models.Model):
        state = FSMField(default="pending", protected=True)

        @transition(field=state, source="pending", target="paid")
        def pay(self): ...

    run(order.pay)    # Moved, AlreadyThere, or IllegalTransition
"""

from __future__ import annotations

from functools import partial
from typing import Any

from .transitions import AlreadyThere, Machine, Moved, run_locked


def run(method: Any, /, *args: Any, **kwargs: Any) -> Moved | AlreadyThere:
    """Call a transition's method on the locked row, and save the object; a duplicate does nothing.

    The row is locked and read again before the method runs: what was changed on the object and not
    saved is dropped. Pass it to the method. If anything fails, all is rolled back, and the object
    is as before; so a state that ``on_error`` names is not stored.

    Args:
        method: a method of a saved object that ``@transition`` is on, such as ``order.pay``.
        args: positional arguments for it.
        kwargs: keyword arguments for it.

    Raises:
        IllegalTransition: the row is in a state that the method is not declared for.
        ObjectDoesNotExist: the row is gone.
        TypeError: it is no such method.
        Exception: whatever the method raises, ``TransitionNotAllowed`` of a condition included.
    """
    meta, obj = getattr(method, "_django_fsm", None), getattr(method, "__self__", None)
    if meta is None or obj is None:
        raise TypeError(
            f"{method!r} is not a method of an object with django-fsm-2's @transition on it. Pass "
            "the method itself and do not call it: run(order.pay)."
        )
    transitions = meta.transitions
    targets = [each.target for each in transitions.values() if _is_state(each.target)]
    machine = Machine(
        state=partial(meta.field.get_state, obj),
        sources=transitions.keys(),
        targets=list(dict.fromkeys(targets)),
        starts_from=meta.has_transition,
    )
    return run_locked(obj, machine, partial(method, *args, **kwargs))


def _is_state(target: Any) -> bool:
    """Whether a target is a state; others are computed when the method runs."""
    return target is not None and not hasattr(target, "get_state")
