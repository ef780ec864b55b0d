"""Methods of ``viewflow.fsm`` that run once, on the locked row.

::

    class OrderFlow:
        state = State(OrderState, default=OrderState.PENDING)

        def __init__(self, order):
            self.order = order

        @state.getter()
        def _get(self): return self.order.state

        @state.setter()
        def _set(self, value): self.order.state = value

        @state.transition(source=OrderState.PENDING, target=OrderState.PAID)
        def pay(self): ...

    run(OrderFlow(order).pay, order)    # Moved, AlreadyThere, or IllegalTransition
"""

from __future__ import annotations

from functools import partial
from typing import Any

from django.db import models

from .transitions import AlreadyThere, Machine, Moved, run_locked


def run(method: Any, obj: models.Model, /, *args: Any, **kwargs: Any) -> Moved | AlreadyThere:
    """Call a transition's method on the locked row, and save the object; a duplicate does nothing.

    The row is locked and read again before the method runs: what was changed on the object and not
    saved is dropped. If anything fails, all is rolled back, and the object is as before.

    Args:
        method: a method of a flow that ``@state.transition`` is on, such as ``flow.pay``. The
            flow's state must be kept in a field of the object, by a getter and a setter.
        obj: the saved object that the flow is about.
        args: positional arguments for the method.
        kwargs: keyword arguments for it.

    Raises:
        IllegalTransition: the row is in a state that the method is not declared for.
        ObjectDoesNotExist: the row is gone.
        TypeError: it is no such method.
        Exception: whatever the method raises, ``TransitionNotAllowed`` of a condition included.
    """
    state, flow = getattr(method, "_state", None), getattr(method, "_instance", None)
    if state is None or flow is None:
        raise TypeError(
            f"{method!r} is not a method of a flow with viewflow's @state.transition on it. Pass "
            "the method itself and do not call it: run(flow.pay, order)."
        )
    transitions = list(method.get_transitions())
    sources = [each.source for each in transitions]
    computed = (type(state).RETURN_VALUE, type(state).GET_STATE)
    targets = [each.target for each in transitions if not isinstance(each.target, computed)]
    machine = Machine(
        state=partial(state.get, flow),
        sources=sources,
        targets=list(dict.fromkeys(targets)),
        starts_from=lambda current: current in sources or type(state).ANY in sources,
    )
    return run_locked(obj, machine, partial(method, *args, **kwargs))
