"""Events of the ``cloudevents`` package, for code that has them: the extra ``[cloudevents]``."""

from __future__ import annotations

from cloudevents.core.base import BaseCloudEvent
from cloudevents.core.v1.event import CloudEvent

from .events import VERSION, Event

_OWN = ("id", "source", "type", "subject", "time", "datacontenttype", "dataschema")


def from_cloudevent(event: BaseCloudEvent) -> Event:
    """The same event, to be handled by a consumer.

    Args:
        event: an event of the ``cloudevents`` package.

    Raises:
        ValueError: it is of another version than 1.0, or an attribute is missing.
    """
    attributes = dict(event.get_attributes())
    version = attributes.pop("specversion", VERSION)
    if version != VERSION:
        raise ValueError(
            f"The event has specversion {version!r}. Make it a CloudEvent of specversion "
            f"{VERSION!r}."
        )
    own = {name: attributes.pop(name, None) for name in _OWN}
    return Event(**own, data=event.get_data(), extensions=attributes)


def to_cloudevent(event: Event) -> CloudEvent:
    """The same event, for the ``cloudevents`` package.

    Args:
        event: an event.
    """
    own = {name: getattr(event, name) for name in _OWN}
    attributes = {name: value for name, value in own.items() if value is not None}
    return CloudEvent({"specversion": VERSION, **attributes, **event.extensions}, event.data)
