"""Once per row and once per state: of many duplicates, one runs a function.

::

    @once_per("order_id", model=Payment)
    def pay(order_id, amount):
        return Payment.objects.create(order_id=order_id, amount=amount)

    match transition(order, "paid", "shipped", effect=ship):
        case Moved(result=parcel): ...
        case AlreadyThere(): ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.db import models, router, transaction

from ...engine import ExecutionContext, idempotent_call
from ...errors import FingerprintMismatch, IdempotencyError, ResponseNotStored
from ...policy import Policy, keys
from .errors import IllegalTransition
from .locks import in_transaction, lock, on_rollback, refuse_marked, write_alias

Function = Callable[..., Any]


def once_per(
    *fields: str, model: type[models.Model], policy: Policy | None = None
) -> Callable[[Function], Function]:
    """Run a function once for each value of a natural key, such as an order's number.

    The function makes a row of the model; a unique constraint over exactly the fields keeps a
    second one out. Its record never expires. When the record is gone, or the row was made in
    another way, the row is the result: the function is not called.

    A record outlives its row. If the row is deleted, the function is still not called again until
    the record is deleted as well: a late retry of a payment that was refunded must not pay.

    Args:
        fields: the names of parameters of the function, which are fields of the model.
        model: the model of the rows. Its database should also keep the records.
        policy: the policy of the call; its ``ttl`` does not count.

    Returns:
        A decorator. The decorated function returns the row, in each call.

    Raises:
        ImproperlyConfigured: no unique constraint is over exactly the fields, or the function
            has no such parameter. These are raised by the decorated function:
        FingerprintMismatch: the row was made with another value of another argument, as its record
            says.
        OperationInProgress: another process is running it for this key.
        ResponseNotStored: it was run, and its row was deleted since.
        IntegrityError: a constraint refused what the function wrote, which was rolled back. If the
            row was made in another way meanwhile, the next call returns it.
        ValueError: a value of the natural key is ``None``.
        RuntimeError: the function made no such row; what it did was rolled back.
    """
    names = {model._meta.get_field(field).name for field in fields}
    if not _is_unique(model, names):
        listed = ", ".join(map(repr, fields))
        raise ImproperlyConfigured(
            f"{model._meta.label} has no unique constraint over exactly {listed}, so two "
            "processes could create two rows at the same time. Add "
            f"UniqueConstraint(fields=[{listed}], name=…) to its Meta.constraints, without "
            "condition=."
        )
    permanent = (policy or Policy()).replace(ttl=None)
    scope = f"once_per:{model._meta.label_lower}:{','.join(fields)}"

    def decorate(function: Function) -> Function:
        name = f"{function.__module__}.{function.__qualname__}"
        signature = inspect.signature(function)
        unknown = [field for field in fields if field not in signature.parameters]
        if unknown or iscoroutinefunction(function):
            what = f"no parameter {unknown[0]!r}" if unknown else "no transaction: it is async"
            raise ImproperlyConfigured(
                f"@once_per is on {name}, which has {what}. Put it on a plain function that has "
                "the fields of the natural key as parameters."
            )

        @functools.wraps(function)
        def row_of_call(*args: Any, **kwargs: Any) -> models.Model:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            others = dict(bound.arguments)
            lookup = {field: others.pop(field) for field in fields}
            using = router.db_for_write(model)
            rows = model._base_manager.using(using).filter(**lookup)
            pairs = ", ".join(f"{field}={value!r}" for field, value in lookup.items())
            named = f"{model._meta.verbose_name} with {pairs}"

            def execute(_: ExecutionContext) -> None:
                with in_transaction(using):  # the claim's own, unless it is leased
                    if rows.exists():
                        return
                    function(*bound.args, **bound.kwargs)
                    refuse_marked(using, name)
                    if not rows.exists():
                        raise RuntimeError(
                            f"{name} created no {named}, so the next call would run it again. "
                            "Create that row, in the database that the model is written to."
                        )

            if None in lookup.values():
                raise ValueError(
                    f"{named} has no natural key. A unique constraint treats NULLs as different, "
                    "so many such rows could exist."
                )
            try:
                idempotent_call(
                    execute,
                    key=_key(lookup),
                    scope=scope,
                    fingerprint=others,
                    name=name,
                    policy=permanent,
                )
            except FingerprintMismatch:
                raise _foreign(
                    FingerprintMismatch(
                        f"The {named} already exists with other values. It was neither created "
                        "again nor changed."
                    )
                ) from None
            row = rows.first()
            if row is None:
                raise _foreign(ResponseNotStored(_DELETED.format(named)))
            return row

        return row_of_call

    return decorate


def _is_unique(model: type[models.Model], names: set[str]) -> bool:
    """Whether a constraint lets no two rows have the same values of these fields."""
    sets = [{field.name} for field in model._meta.concrete_fields if field.unique]
    sets += (set(constraint.fields) for constraint in model._meta.total_unique_constraints)
    return names in sets


def _key(lookup: Mapping[str, Any]) -> str:
    """The key, so that people can read it; a digest where it is too long."""
    values = {name: getattr(value, "pk", value) for name, value in lookup.items()}
    return keys.fit(
        ";".join(f"{name}={quote(str(each), safe='')}" for name, each in values.items())
    )


_DELETED = (
    "The {} was created and deleted before, so it is not created again: this call may be a late "
    "retry. To create another one on purpose, use another natural key, for example with the "
    "number of the attempt."
)


def _foreign(error: IdempotencyError) -> IdempotencyError:
    """The error of another operation than that of the request around it."""
    error.foreign = True
    return error


@dataclass(frozen=True, slots=True)
class Moved:
    """The object was moved by this call.

    Attributes:
        obj: the object, in its new state.
        state: the new state.
        result: what the effect returned.
    """

    obj: models.Model
    state: Any
    result: Any = None


@dataclass(frozen=True, slots=True)
class AlreadyThere:
    """The object was moved before, by another process or an earlier call; nothing was done.

    Attributes:
        obj: the object, in that state.
        state: the state.
    """

    obj: models.Model
    state: Any


def transition(
    obj: models.Model,
    source: Any,
    target: Any,
    *,
    effect: Callable[[Any], Any] | None = None,
    field: str = "state",
) -> Moved | AlreadyThere:
    """Move an object from one state to another, and run an effect, once.

    The row is locked and read again. If it is in one of the sources, ``save()`` writes the new
    state. The effect runs after it, in the same transaction: both commit, or neither. A duplicate
    waits for the first one to end, and then does nothing. The state that counts is the row's, not
    the object's in memory: what was changed on the object and not saved is dropped.

    Args:
        obj: a saved object. If it is versioned, its version is counted.
        source: the state to start from, or a list, tuple or set of several.
        target: the state to end in.
        effect: called with the object once it has been moved. What it does outside of the
            database is not rolled back: use
            :meth:`~idempotency_django.engine.context.ExecutionContext.step` for that.
        field: the name of the state's field.

    Raises:
        IllegalTransition: the row is in another state; nothing was done.
        ObjectDoesNotExist: the row is gone.
        ValueError: the target is among the sources, so that no duplicate could be told.
        TransactionManagementError: the effect has caught an error of the database, or marked the
            transaction for rollback; the row is as before, and so is the object's state.
        Exception: an error of the effect; likewise. What else the effect has set on the object
            stays: load it again.
    """
    sources = list(source) if isinstance(source, list | tuple | set | frozenset) else [source]
    if target in sources:
        raise ValueError(
            f"A transition to {target!r} cannot also start from {target!r}: a duplicate would "
            "repeat its effects. Remove that state from the sources."
        )
    using = write_alias(obj)
    with transaction.atomic(using=using):
        lock(obj, using)
        state = getattr(obj, field)
        if state == target:
            return AlreadyThere(obj, state)
        if state not in sources:
            raise IllegalTransition(
                f"The {obj._meta.verbose_name} {obj.pk} is in the state {str(state)!r}, which has "
                f"no transition to {str(target)!r}. Nothing was done."
            )
        on_rollback(using, functools.partial(setattr, obj, field, state))
        setattr(obj, field, target)
        obj.save(update_fields=[field], using=using)
        result = effect(obj) if effect else None
        refuse_marked(using, "The effect")
        return Moved(obj, getattr(obj, field), result)
