"""``manage.py derive_idempotency_keys``"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from ...errors import StoreUnavailable
from ...models import IdempotencyKey, IdempotencyStep
from ...stores import Store, derived_key, stores


class Command(BaseCommand):
    """Tells an operator under which keys to look at a payment provider's."""

    help = (
        "Prints the derived keys (request.idempotency.derive_key()) that the handler of an "
        "operation sent to other services, such as a payment provider."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("key", metavar="KEY", help="The idempotency key of the operation.")
        parser.add_argument(
            "names",
            metavar="NAME",
            nargs="*",
            help="The name that was passed to derive_key(), for example charge (default: the names "
            "of the stored steps).",
        )
        parser.add_argument(
            "--scope", help="The scope of the key; required if the key exists in several scopes."
        )
        parser.add_argument(
            "--store",
            default="default",
            metavar="ALIAS",
            help="The store in IDEMPOTENCY['STORES'] with the record (default: default).",
        )

    def handle(self, *, key: str, names: list[str], scope: str | None, **options: Any) -> None:
        try:
            store = stores[options["store"]]
            if scope is None:
                scope = self._only_scope(store, key)
            record = store.get(key, scope)
        except (ImproperlyConfigured, StoreUnavailable) as error:
            raise CommandError(str(error)) from error
        if record is None:
            raise CommandError(f"The store {store.alias!r} has no key {key!r} in {scope!r}.")
        names = names or _names_of_steps(store, key, scope)
        if not names:
            raise CommandError(
                "No step is stored for this key. Pass the names of the derived keys."
            )
        for name in names:
            derived = derived_key(scope=scope, key=key, fingerprint=record.fingerprint, name=name)
            self.stdout.write(f"{name}: {derived}")

    def _only_scope(self, store: Store, key: str) -> str:
        """The scope that the key is in, where there is no choice."""
        if store.using is None:
            raise CommandError(
                f"The store {store.alias!r} cannot search in all scopes. Pass --scope."
            )
        records = IdempotencyKey.objects.using(store.using).filter(key=key)
        scopes = sorted(records.values_list("scope", flat=True)[:10])
        if not scopes:
            raise CommandError(f"The store {store.alias!r} has no key {key!r}.")
        if len(scopes) > 1:
            listed = "\n".join(f"  --scope '{scope}'" for scope in scopes)
            raise CommandError(f"The key {key!r} exists in several scopes. Choose one:\n{listed}")
        return scopes[0]


def _names_of_steps(store: Store, key: str, scope: str) -> list[str]:
    if store.using is None:
        return []
    steps = IdempotencyStep.objects.using(store.using).order_by("pk")
    return list(steps.filter(record__key=key, record__scope=scope).values_list("name", flat=True))
