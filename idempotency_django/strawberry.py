"""Strawberry: an extension that runs a mutation field once per key.

::

    @strawberry.mutation(extensions=[IdempotencyExtension(required=True)])
    def create_order(self, info: strawberry.Info, reference: str) -> Order: ...

A retry gets the stored result, from which the client's selection is resolved again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import Any, Final
from uuid import UUID

from asgiref.sync import sync_to_async
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured, ObjectDoesNotExist
from django.core.files.uploadedfile import UploadedFile as DjangoFile
from django.db.models import Model
from django.http import HttpRequest
from graphql import (
    FieldNode,
    FragmentSpreadNode,
    GraphQLError,
    GraphQLResolveInfo,
    SelectionSetNode,
    get_argument_values,
    is_object_type,
)
from graphql.execution import values as graphql_values
from strawberry.annotation import StrawberryAnnotation
from strawberry.extensions import FieldExtension
from strawberry.types import Info
from strawberry.types.arguments import StrawberryArgument
from strawberry.types.field import StrawberryField
from strawberry.types.maybe import Some
from strawberry.types.unset import UNSET

from .conf import conf
from .engine import Result
from .engine.context import ExecutionContext
from .engine.functions import CallOutcome, arun_plan, json_payload, run_plan
from .engine.planning import Plan
from .errors import (
    IdempotencyError,
    KeyMissing,
    OperationInProgress,
    ResponseNotStored,
    StoreUnavailable,
)
from .http.bodies import uploaded
from .http.messages import PLANNED, key_header, problem_of
from .http.parts import RequestPart, refuse_fields_of_responses
from .http.unwrapping import POLICY, PROTECTED
from .policy import UNSET as UNDECLARED
from .policy import Policy, dialect_of, keys, resolve
from .policy.canonical import canonical, content_digest
from .policy.identity import header_of

ARGUMENT: Final = "idempotency_key"


class IdempotencyExtension(FieldExtension):
    """Runs a mutation once per key, and returns its stored result to retries.

    The field gets the argument ``idempotencyKey``. Without it, the request's key header counts,
    together with the field's alias, because a request may have several mutations. The resolver
    runs in the transaction that stores its result. A raised error is rolled back and not stored;
    an async resolver has no transaction.
    It is the first of the field's extensions, so that all others run for every request, before a
    replay, and ``permission_classes`` do, too.

    Args:
        policy: the field's policy; by default the project's. ``should_store`` is called with the
            request and the result; ``False`` rolls back, for results that are errors. The project's
            is for HTTP responses, and is not called.
        store: turns a result into JSON, where it is no scalar, saved model, enum, or Strawberry
            type, nor a list of such.
        load: turns that JSON into a result again; the two come together.
        fields: fields of :class:`~idempotency_django.policy.Policy`, instead of ``policy`` or in
            addition to it.

    Raises:
        ImproperlyConfigured: ``store`` or ``load`` is missing, or the policy has ``on_replay``,
            ``rebuild``, ``replay_status``, ``on_conflict="accepted"``, ``store_errors`` or
            ``store_only()``, which are for HTTP responses.
        TypeError: of the schema: another extension comes first, or the resolver takes the argument
            itself.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        store: Callable[[Any], Any] | None = None,
        load: Callable[[Any], Any] | None = None,
        **fields: Any,
    ) -> None:
        if (store is None) is not (load is None):
            raise ImproperlyConfigured(
                "An IdempotencyExtension has only one of store= and load=. Pass both, or none."
            )
        self.policy = (policy or Policy()).replace(**fields) if fields else policy or Policy()
        refuse_fields_of_responses(
            self.policy,
            "an IdempotencyExtension",
            "and a mutation has none of its own. Remove them. To change what a retry gets, pass "
            "store= and load=.",
            "store_errors",
            "store_only",
        )
        setattr(self, PROTECTED, "extension")
        setattr(self, POLICY, self.policy)
        self._store = store
        self._load = load

    def apply(self, field: StrawberryField) -> None:
        """Add the argument; called by Strawberry when it makes the schema."""
        resolving = [each for each in field.extensions if each.supports_sync or each.supports_async]
        if resolving[0] is not self:
            raise ImproperlyConfigured(
                f"The IdempotencyExtension of {field.python_name} is not the first of its "
                "extensions, so those before it, such as permissions, would not run before a "
                "replay. Move it to the beginning of extensions=[…]."
            )
        taken = field.base_resolver.arguments if field.base_resolver else []
        if any(each.python_name == ARGUMENT for each in taken):
            raise ImproperlyConfigured(
                f"The resolver of {field.python_name} has an argument {ARGUMENT}, which the "
                "IdempotencyExtension adds and reads. Remove it from the resolver."
            )
        if all(each.python_name != ARGUMENT for each in field.arguments):
            field.arguments = [
                *field.arguments,
                StrawberryArgument(
                    python_name=ARGUMENT,
                    graphql_name=None,
                    type_annotation=StrawberryAnnotation(str | None),
                    description=(
                        "A new, unique key for each new operation, and the same key for each "
                        "retry of it. A retry gets the first result."
                    ),
                    default=None,
                ),
            ]

    def resolve(self, next_: Callable[..., Any], source: Any, info: Info, **kwargs: Any) -> Any:
        """Run the resolver, or load its stored result."""
        request = _request_of(info)
        part = self._part(request, info, kwargs)

        def execute(execution: ExecutionContext) -> Any:
            with part.running(execution):
                return next_(source, info, **kwargs)

        try:
            planned = part.plan()
            if planned is not None:
                answer = partial(self._answer, request, info)
                outcome = run_plan(
                    planned, execute, answer=answer, admit=part.admit, of_client=True
                )
                return self._loaded(outcome, info)
        except IdempotencyError as error:
            if part.is_foreign_error:
                raise
            raise _graphql_error(error, self.policy) from error
        return next_(source, info, **kwargs)

    async def resolve_async(
        self, next_: Callable[..., Awaitable[Any]], source: Any, info: Info, **kwargs: Any
    ) -> Any:
        """:meth:`resolve` for an async resolver."""
        request = _request_of(info)
        part = self._part(request, info, kwargs)

        async def execute(execution: ExecutionContext) -> Any:
            with part.running(execution):
                return await next_(source, info, **kwargs)

        try:
            planned = await sync_to_async(part.plan)(asynchronous=True)
            if planned is not None:
                answer = partial(self._answer, request, info)
                outcome = await _to_its_end(
                    arun_plan(planned, execute, answer=answer, admit=part.admit, of_client=True)
                )
                return await sync_to_async(self._loaded)(outcome, info)
        except IdempotencyError as error:
            if part.is_foreign_error:
                raise
            raise _graphql_error(error, self.policy) from error
        return await next_(source, info, **kwargs)

    def _part(self, request: HttpRequest, info: Info, kwargs: dict[str, Any]) -> RequestPart:
        """The mutation as a part of the request; its key is taken out of the arguments."""
        policy = resolve(self.policy)
        key, name = kwargs.pop(ARGUMENT, None), info.field_name
        argument = info.schema.config.name_converter.apply_naming_config(ARGUMENT)
        header = header_of(dialect_of(policy))
        setattr(request, PLANNED, False)  # what became of the key, the mutation says
        if key is None:
            key = key_header(request, dialect_of(policy))
            if key is not None and keys.reads_header(policy.key):
                name = ".".join(map(str, info.path.as_list()))
                if conf.enabled and _is_batch(request, info):
                    if policy.requires_key(request.method or "") or not keys.is_made_up(key):
                        raise _graphql_error(_shared(header, argument), self.policy)
                    key = None
        return RequestPart(
            request,
            policy,
            key=key,
            name=f"mutation {name}",
            content=partial(_compared, kwargs),
            path=lambda: f"{request.path}#{_place(info._raw_info)}",
            missing=(
                f"This mutation requires the argument {argument}, or the header {header}. Send a "
                "new, unique key with each new operation and the same key with each retry of it."
            ),
        )

    def _answer(self, request: HttpRequest, info: Info, planned: Plan, value: Any) -> Result:
        """The result for the engine. ``TypeError``: it cannot be stored."""
        wanted = self.policy.should_store  # the project's and a dialect's are for HTTP responses
        if wanted not in (UNDECLARED, None) and wanted(request, value) is False:
            return Result(value, None, error="The policy's should_store= rejected this result.")
        try:
            stored = _encoded(value, info) if self._store is None else self._store(value)
            text = json.dumps(stored)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(
                f"The result of {planned.operation.name} cannot be stored: {error}. Pass store= "
                "and load= to the IdempotencyExtension, for example to store a primary key."
            ) from error
        return Result(value, json_payload(text, planned.policy))

    def _loaded(self, outcome: CallOutcome, info: Info) -> Any:
        if not outcome.replayed:
            return outcome.result
        try:
            if self._load is not None:
                return self._load(outcome.result)
            return _decoded(outcome.result, info)
        except ObjectDoesNotExist as error:
            raise ResponseNotStored(
                "The operation with this idempotency key was executed and is not executed again. "
                f"Its result no longer exists: {error}"
            ) from error


async def _to_its_end(running: Coroutine[Any, Any, CallOutcome]) -> CallOutcome:
    """Wait for a mutation also if it is cancelled: a retry would repeat what it has done.

    graphql-core cancels the fields beside one that fails. The second time, it is cancelled.
    """
    task = asyncio.ensure_future(running)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with suppress(Exception):
            await task
        raise


def _request_of(info: Info) -> HttpRequest:
    context: Any = info.context
    request = context.get("request") if isinstance(context, dict) else context.request
    if isinstance(request, HttpRequest):
        return request
    raise ImproperlyConfigured(
        f"The context of {info.field_name} has no request of Django. Serve the schema with a view "
        "of strawberry.django.views."
    )


def _place(info: GraphQLResolveInfo[Any]) -> str:
    """The mutation below the fields around it, as in ``shop(8c…).create`` or ``orders.1.cancel``.

    They say whose the mutation is: so their arguments are there, as a digest, and the position in
    a list. An alias makes no difference.
    """
    steps, step = [], info.path.prev
    while step is not None:
        steps.append(step)
        step = step.prev
    names, selections, variables = [], [info.operation.selection_set], info.variable_values
    container = getattr(graphql_values, "VariableValues", None)
    if container is not None and isinstance(variables, dict):
        variables = container({}, variables)  # as Strawberry's own resolvers of directives do
    for step in reversed(steps):
        if step.typename is None:
            names.append(str(step.key))
            continue
        nodes = [
            node
            for selection in selections
            for node in _selected(info, selection, step.key, step.typename)
        ]
        field: Any = info.schema.get_type(step.typename)
        name = nodes[0].name.value
        arguments = get_argument_values(field.fields[name], nodes[0], variables)
        if arguments:
            name += f"({content_digest(canonical(_compared(arguments)))})"
        names.append(name)
        selections = [node.selection_set for node in nodes if node.selection_set]
    return ".".join([*names, info.field_name])


def _selected(
    info: GraphQLResolveInfo[Any], selection: SelectionSetNode, key: str | int, typename: str
) -> Iterator[FieldNode]:
    """The fields of a type that a selection has under a name; all have the same arguments."""
    for node in selection.selections:
        if isinstance(node, FieldNode):
            if (node.alias or node.name).value == key:
                yield node
            continue
        fragment: Any = node
        if isinstance(node, FragmentSpreadNode):
            fragment = info.fragments[node.name.value]
        condition = fragment.type_condition and fragment.type_condition.name.value
        if condition in (None, typename) or not is_object_type(info.schema.get_type(condition)):
            yield from _selected(info, fragment.selection_set, key, typename)


def _is_batch(request: HttpRequest, info: Info) -> bool:
    """Whether the request has several operations, which all have its headers."""
    if info.schema.config.batching_config is None:
        return False  # the view refuses a list
    is_form = request.content_type == "multipart/form-data"
    operations = json.loads(request.POST["operations"] if is_form else request.body)
    return isinstance(operations, list) and len(operations) > 1


def _shared(header: str, argument: str) -> KeyMissing:
    # Nothing tells the operations apart in the same way for each retry: one may be refused before
    # it gets here, and an async view runs them in any order.
    return KeyMissing(
        f"This request is a batch of several operations, which cannot share the key in the header "
        f"{header}. Send each mutation with the argument {argument}, or in a request of its own."
    )


def _graphql_error(error: IdempotencyError, policy: Policy) -> GraphQLError:
    """The refusal as an error of GraphQL, whose extensions are the members of the problem."""
    members = problem_of(error, dialect_of(resolve(policy)))
    if isinstance(error, OperationInProgress | StoreUnavailable):
        members["retry_after"] = max(1, math.ceil(conf.retry_after.total_seconds()))
    return GraphQLError(error.detail, extensions=members)


def _compared(value: Any) -> Any:
    """An argument as plain data: without fields that were left out, and with digests of files."""
    if isinstance(value, DjangoFile):
        return uploaded("", value)
    if isinstance(value, Some):
        return ("some", _compared(value.value))
    if isinstance(value, list | tuple):
        return [_compared(each) for each in value]
    if isinstance(value, dict):
        return {k: _compared(each) for k, each in value.items() if each is not UNSET}
    if getattr(type(value), "__strawberry_definition__", None) and dataclasses.is_dataclass(value):
        return _compared(
            {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        )
    return value


# Results as JSON. Whatever is not JSON itself is a list, which begins with its kind.

_TEXTS: Final[dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]]] = {
    Decimal: ("decimal", str, Decimal),
    UUID: ("uuid", str, UUID),
    datetime: ("datetime", datetime.isoformat, datetime.fromisoformat),
    date: ("date", date.isoformat, date.fromisoformat),
    time: ("time", time.isoformat, time.fromisoformat),
}
_READ: Final = {kind: read for kind, _, read in _TEXTS.values()}


def _encoded(value: Any, info: Info) -> Any:
    """A result as JSON. ``TypeError``: it has no type that can be stored."""
    kind = type(value)
    definition = getattr(kind, "__strawberry_definition__", None)
    if kind in _TEXTS:
        name, write, _ = _TEXTS[kind]
        return [name, write(value)]
    if isinstance(value, Enum) and definition is not None:
        return ["enum", definition.name, value.name]
    if value is None or kind in (str, int, float, bool):
        return value
    if kind in (list, tuple):
        return ["list", *(_encoded(each, info) for each in value)]
    if isinstance(value, Model):
        if value.pk is None or value._state.adding:
            raise TypeError(f"{kind.__name__} is not saved")
        label, using = value._meta.label_lower, value._state.db
        return ["model", label, using, value._meta.pk.value_to_string(value)]
    if dataclasses.is_dataclass(value) and definition is not None and definition.name:
        names = [each.name for each in dataclasses.fields(value) if each.init]
        fields = {each: _encoded(getattr(value, each), info) for each in names}
        return ["type", _name_of(kind, definition.name, info), fields]
    raise TypeError(f"{kind.__name__} is neither a scalar, a model, an enum nor a Strawberry type")


def _class_of(definition: Any) -> Any:
    """The class of a type of the schema: of a use of a generic type, the generic one."""
    definition = getattr(definition, "concrete_of", None) or definition
    return getattr(definition, "origin", None)


def _name_of(kind: type, name: str, info: Info) -> str:
    """A name in the schema that leads back to the class."""
    if _class_of(info.schema.get_type_by_name(name)) is kind:
        return name
    for other, known in info.schema.schema_converter.type_map.items():
        if _class_of(known.definition) is kind:
            return other
    raise TypeError(f"{kind.__name__} is no type of the schema")


def _decoded(stored: Any, info: Info) -> Any:
    """The result that :func:`_encoded` wrote."""
    match stored:
        case ["list", *items]:
            return [_decoded(each, info) for each in items]
        case ["model", label, using, pk]:
            model = apps.get_model(label)
            return model._default_manager.using(using).get(pk=pk)
        case ["enum", name, member]:
            definition: Any = info.schema.get_type_by_name(name)
            return definition.wrapped_cls[member]
        case ["type", name, fields]:
            definition = info.schema.get_type_by_name(name)
            return _class_of(definition)(**{k: _decoded(each, info) for k, each in fields.items()})
        case [kind, text]:
            return _READ[kind](text)
    return stored
