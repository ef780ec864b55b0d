"""Natural keys: the row itself says whether something was done.

::

    payment, created = ensure(Payment, order=order, defaults={"amount": 500})

    @once_per("order_id", model=Payment)
    def pay(order_id, amount):
        return Payment.objects.create(order_id=order_id, amount=amount)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar
from urllib.parse import quote

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import FieldDoesNotExist, ImproperlyConfigured
from django.db import IntegrityError, connections, models, router, transaction
from django.db.models import UniqueConstraint

from ...engine import ExecutionContext, idempotent_call
from ...errors import FingerprintMismatch, IdempotencyError, ResponseNotStored
from ...policy import Policy, digest, keys
from .locks import in_transaction, refuse_marked

ModelT = TypeVar("ModelT", bound=models.Model)


def ensure(
    model: type[ModelT],
    /,
    defaults: Mapping[str, Any] | None = None,
    using: str | None = None,
    **lookup: Any,
) -> tuple[ModelT, bool]:
    """Create a row unless it exists: ``get_or_create()`` for rows that are usually new.

    It inserts first, by ``save()``, and looks only if the database refuses: one statement for a
    new row. Within a transaction, the INSERT gets a savepoint, so that the transaction goes on.

    Args:
        model: the model. A unique constraint must be over exactly the fields of the lookup.
        defaults: values of other fields for a new row. What is callable is called.
        using: the database; by default the database that the model is written to.
        lookup: the fields that identify the row, and their values.

    Returns:
        The object, and whether it was created.

    Raises:
        ImproperlyConfigured: no unique constraint is over exactly these fields.
        ValueError: a value is ``None``, which no constraint compares.
        IntegrityError: another constraint refused the row.
    """
    validate_lookup(model, lookup)
    alias = using or router.db_for_write(model)
    given = {
        name: value() if callable(value) else value for name, value in (defaults or {}).items()
    }
    obj = model(**given | lookup)
    is_open = connections[alias].in_atomic_block
    try:
        with transaction.atomic(using=alias) if is_open else nullcontext():
            # All of it: Django would update an existing row of a parent.
            obj.save(force_insert=(models.Model,) if model._meta.parents else True, using=alias)
    except IntegrityError:
        # Whichever constraint it was: an existing row is the requested one.
        found = row_of(model, alias, lookup)
        if found is None:
            raise
        return found, False
    return obj, True


def row_of(model: type[ModelT], using: str, lookup: Mapping[str, Any]) -> ModelT | None:
    """The row with these values, also where a transaction's snapshot is older than the row."""
    rows = model._base_manager.using(using).filter(**lookup)
    row = rows.first()
    connection = connections[using]
    if row is not None or not connection.in_atomic_block:
        return row
    return rows.select_for_update().first() if connection.vendor == "mysql" else None


def validate_lookup(model: type[models.Model], lookup: Mapping[str, Any]) -> None:
    """Refuse a lookup that no constraint makes unique.

    Raises:
        ImproperlyConfigured: no unique constraint is over exactly these fields.
        ValueError: a value is ``None``, which no constraint compares.
    """
    compares_nulls = compared(model, lookup)
    unknown = [name for name, value in lookup.items() if value is None]
    if unknown and not compares_nulls:
        raise ValueError(
            f"{', '.join(unknown)} is None. A unique constraint treats NULLs as different, so "
            "many such rows could exist. Don't allow NULL, or give the constraint "
            "nulls_distinct=False (PostgreSQL)."
        )


def compared(model: type[models.Model], names: Any) -> bool:
    """Whether the unique constraint over these fields takes two NULLs for equal.

    Raises:
        ImproperlyConfigured: there is no such constraint.
    """
    try:
        wanted = {model._meta.get_field(name).name for name in names}
    except FieldDoesNotExist as error:
        raise ImproperlyConfigured(
            f"{error}. A natural key is made of the model's own fields, without lookups such as "
            "name__iexact."
        ) from None
    found = [nulls for fields, nulls in _unique_sets(model) if fields == wanted]
    if not found:
        listed = ", ".join(repr(name) for name in names)
        raise ImproperlyConfigured(
            f"{model._meta.label} has no unique constraint over exactly {listed}, so two "
            "processes could create two rows at the same time. Add "
            f"UniqueConstraint(fields=[{listed}], name=…) to its Meta.constraints, without "
            "condition= and deferrable=."
        )
    return any(found)


def _unique_sets(model: type[models.Model]) -> Iterator[tuple[set[str], bool]]:
    """The fields of each unique constraint that is checked at once and for all rows."""
    for field in model._meta.concrete_fields:
        if field.unique:
            yield {field.name}, False
    for options in [model._meta, *(parent._meta for parent in model._meta.all_parents)]:
        for names in options.unique_together:
            yield set(names), False
        for constraint in options.constraints:
            if not isinstance(constraint, UniqueConstraint) or not constraint.fields:
                continue
            if constraint.condition is None and constraint.deferrable is None:
                yield set(constraint.fields), constraint.nulls_distinct is False


Function = Callable[..., Any]
ErrorT = TypeVar("ErrorT", bound=IdempotencyError)


def once_per(
    *fields: str,
    model: type[models.Model],
    result: Callable[[Any], Any] | None = None,
    policy: Policy | None = None,
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
        result: makes the result of a row; by default the result is the row.
        policy: the policy of the call; its ``ttl`` does not count.

    Returns:
        A decorator. The decorated function returns the result of the row, in each call.

    Raises:
        ImproperlyConfigured: no unique constraint is over exactly the fields, or the function
            has no such parameter. These are raised by the decorated function:
        FingerprintMismatch: the row was made with another value of another argument. Without the
            record, the arguments that are fields of the model are compared with the row.
        OperationInProgress: another process is running it for this key.
        ResponseNotStored: it was run, and its row was deleted since.
        IntegrityError: another constraint refused what the function wrote.
        ValueError: a value of the natural key is ``None``.
        RuntimeError: the function made no such row; what it did was rolled back.
    """
    compared(model, fields)  # to fail where it is written

    def decorate(function: Function) -> Function:
        once = _OncePer(function, fields, model, policy)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            row = once.row(*args, **kwargs)
            return row if result is None else result(row)

        return call

    return decorate


class _OncePer:
    """A function, its natural key, and the rows that it makes."""

    def __init__(
        self,
        function: Function,
        fields: tuple[str, ...],
        model: type[models.Model],
        policy: Policy | None,
    ) -> None:
        self.function = function
        self.fields = fields
        self.model = model
        self.policy = (policy or Policy()).replace(ttl=None)
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.signature = inspect.signature(function)
        unknown = [field for field in fields if field not in self.signature.parameters]
        if unknown or iscoroutinefunction(function):
            what = f"no parameter {unknown[0]!r}" if unknown else "no transaction: it is async"
            raise ImproperlyConfigured(
                f"@once_per is on {self.name}, which has {what}. Put it on a plain function that "
                "has the fields of the natural key as parameters."
            )

    @property
    def using(self) -> str:
        """The database that the rows are written to."""
        return router.db_for_write(self.model)

    def row(self, *args: Any, **kwargs: Any) -> models.Model:
        """The row of a call: a new row, or the existing one."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        others = dict(bound.arguments)
        lookup = {field: others.pop(field) for field in self.fields}
        validate_lookup(self.model, lookup)
        made: list[models.Model] = []

        def execute(_: ExecutionContext) -> None:
            with in_transaction(self.using):  # the claim's own, unless it is leased
                made[:] = [self._there(lookup, others) or self._made(lookup, bound)]
                refuse_marked(self.using, self.name)

        try:
            idempotent_call(
                execute,
                key=self._key(lookup),
                scope=f"once_per:{self.model._meta.label_lower}:{','.join(self.fields)}",
                fingerprint=others,
                name=self.name,
                policy=self.policy,
            )
        except FingerprintMismatch:
            raise self._mismatch(lookup) from None
        except IntegrityError:
            row = self._there(lookup, others)
            if row is None:  # it was another constraint
                raise
            return row
        row = made[0] if made else self._find(lookup)
        if row is None:
            raise _foreign(ResponseNotStored(_DELETED.format(self._named(lookup))))
        return row

    def _made(self, lookup: Mapping[str, Any], bound: inspect.BoundArguments) -> models.Model:
        made = self.function(*bound.args, **bound.kwargs)
        row = made if isinstance(made, self.model) else self._find(lookup)
        if row is None or any(self._differs(row, *pair) for pair in lookup.items()):
            raise RuntimeError(
                f"{self.name} created no {self._named(lookup)}, so the next call would run it "
                "again. Create that row, in the database that the model is written to, and return "
                "it."
            )
        return row

    def _there(self, lookup: Mapping[str, Any], others: Mapping[str, Any]) -> models.Model | None:
        """The existing row, if it was created with the same arguments."""
        row = self._find(lookup)
        if row is not None and any(self._differs(row, *pair) for pair in others.items()):
            raise self._mismatch(lookup)
        return row

    def _find(self, lookup: Mapping[str, Any]) -> models.Model | None:
        return row_of(self.model, self.using, lookup)

    def _differs(self, row: models.Model, name: str, value: Any) -> bool:
        """Whether the row has another value than the argument; no: it has no such field."""
        field = self._field(name)
        return field is not None and getattr(row, field.attname) != _plain(field, value)

    def _field(self, name: str) -> models.Field[Any, Any] | None:
        fields = self.model._meta.concrete_fields
        return next((field for field in fields if name in (field.name, field.attname)), None)

    def _key(self, lookup: Mapping[str, Any]) -> str:
        """The key, so that people can read it; a digest where it is too long."""
        pairs = [(name, _plain(self._field(name), value)) for name, value in lookup.items()]
        key = ";".join(f"{name}={quote(str(value), safe='')}" for name, value in pairs)
        return key if len(key) <= keys.MAX_LENGTH else digest(key)

    def _named(self, lookup: Mapping[str, Any]) -> str:
        pairs = ", ".join(f"{name}={value!r}" for name, value in lookup.items())
        return f"{self.model._meta.verbose_name} with {pairs}"

    def _mismatch(self, lookup: Mapping[str, Any]) -> FingerprintMismatch:
        return _foreign(
            FingerprintMismatch(
                f"The {self._named(lookup)} already exists with other values. It was neither "
                "created again nor changed."
            )
        )


_DELETED = (
    "The {} was created and deleted before, so it is not created again: this call may be a late "
    "retry. To create another one on purpose, use another natural key, for example with the "
    "number of the attempt."
)


def _plain(field: models.Field[Any, Any] | None, value: Any) -> Any:
    """A value in the field's form: the order's number for an order, 17 for "17"."""
    if field is None:
        return value
    if isinstance(value, models.Model):
        target = getattr(field, "target_field", field)
        return getattr(value, target.attname)
    return field.to_python(value)


def _foreign(error: ErrorT) -> ErrorT:
    """The error of another operation than that of the request around it."""
    error.foreign = True
    return error
