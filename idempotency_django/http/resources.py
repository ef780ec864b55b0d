"""What an operation has made: noted in its record, for a client that lost the response.

The note is one of the payload, so every store keeps it, and it lives as long as the record. It says
whose the key is: in a scope that callers share, no caller finds what another one has made.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from django.apps import apps
from django.urls import NoReverseMatch

from ..policy.canonical import digest
from ..stores.records import RESOURCE, Payload


def owner_of(caller: str, host: str) -> str:
    """The digest by which a note names who may find the resource.

    Args:
        caller: whose the key is; empty: everybody's who knows it.
        host: where the key counts; empty: everywhere.
    """
    return digest(caller, host)


def with_resource(payload: Payload, instance: Any, owner: str) -> Payload:
    """The payload, with a note of what the operation has made.

    Args:
        payload: the stored response.
        instance: a saved model instance.
        owner: from :func:`owner_of`.
    """
    label = instance._meta.concrete_model._meta.label_lower
    note = (RESOURCE, f"{owner} {label} {instance.pk}")
    return replace(payload, headers=(*payload.headers, note))


def pk_of(payload: Payload, model: Any, owners: set[str]) -> str | None:
    """The primary key of what the operation has made; ``None``: it is not one of this model.

    Args:
        payload: the stored response.
        model: what is looked for.
        owners: who asks, by each of their names.
    """
    owner, label, pk = (payload.note(RESOURCE) or "  ").split(" ", 2)
    is_model = label == model._meta.concrete_model._meta.label_lower
    return pk if is_model and owner in owners else None


def url_of(payload: Payload | None) -> str:
    """The URL of what the operation has made; empty: it is gone, or has no URL."""
    instance = resource_of(payload)
    with suppress(NoReverseMatch):
        return str(instance.get_absolute_url()) if hasattr(instance, "get_absolute_url") else ""
    return ""


def resource_of(payload: Payload | None) -> Any:
    """The object that the operation has made; ``None``: it is gone, or its model is."""
    note = payload.note(RESOURCE) if payload is not None else None
    if note is None:
        return None
    _, label, pk = note.split(" ", 2)
    try:
        model = apps.get_model(label)
    except LookupError:  # the project has removed it
        return None
    return model._default_manager.filter(pk=pk).first()
