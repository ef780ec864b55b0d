"""Events: CloudEvents 1.0, read and written as its JSON format says."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from idempotency_django.contrib.messaging import Event

BASE = {"specversion": "1.0", "id": "1", "source": "/shop", "type": "order.paid"}

EARLIEST = datetime(1000, 1, 1)  # noqa: DTZ001  # as the strategy wants it
few = settings(max_examples=25, deadline=None, derandomize=True)

some_text = st.text(min_size=1, max_size=20).filter(
    lambda text: not any(0xD800 <= ord(character) < 0xE000 for character in text)
)
some_data = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | some_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(some_text, inner, max_size=3),
    max_leaves=8,
)
events = st.builds(
    Event,
    id=some_text,
    source=some_text,
    type=some_text,
    data=some_data | st.binary(min_size=1),
    subject=st.none() | some_text,
    time=st.datetimes(min_value=EARLIEST, timezones=st.just(UTC)),
    extensions=st.dictionaries(
        st.from_regex(r"x[a-z0-9]{0,8}", fullmatch=True), some_text | st.integers(-9, 9)
    ),
)


def read(**members: Any) -> Event:
    return Event.from_json(json.dumps({**BASE, **members}))


class TestJson:
    @few
    @given(events)
    def test_round_trip(self, event: Event) -> None:
        """What is written is read as the same event, as text and as bytes."""
        assert Event.from_json(event.to_json()) == event
        assert Event.from_json(event.to_json().encode()) == event

    @few
    @given(events)
    def test_the_reference_implementation_agrees(self, event: Event) -> None:
        """The package of the CloudEvents project reads what is written, and the other way round."""
        theirs = JSONFormat().read(CloudEvent, event.to_json())
        assert Event.from_json(JSONFormat().write(theirs)) == event

    def test_absent_members(self) -> None:
        """A member that is null is absent, as the format says; data need not be there."""
        assert read(subject=None, data=None) == Event(id="1", source="/shop", type="order.paid")

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            (b"\xff", "not JSON in UTF-8"),
            ("[" * 100_000, "not JSON"),
            (
                '{"data": [' + '{"a": [' * 50 + "]}" * 50 + "]}",
                "more than 100 nested lists and objects",
            ),
            ("[]", "list in JSON"),
            ('{"id": "1", "id": "2"}', "appears twice"),
            ('{"data": NaN}', "NaN"),
        ],
    )
    def test_no_event(self, text: str | bytes, why: str) -> None:
        """What is no event is refused with the reason."""
        with pytest.raises(ValueError, match=why):
            Event.from_json(text)

    @pytest.mark.parametrize(
        ("members", "why"),
        [
            ({"specversion": None}, "no specversion"),
            ({"specversion": "0.3"}, "specversion '0.3'"),
            ({"id": None}, "no id"),
            ({"id": 7}, "the id 7"),
            ({"source": None}, "no source"),
            ({"type": ["order.paid"]}, "non-empty string"),
            ({"time": "2018-04-05"}, "no time zone"),
            ({"time": "2018-13-05T17:31:00Z"}, "month"),
            ({"time": 7}, "isoformat"),
            ({"data_base64": "?"}, "Base64"),
            ({"data_base64": "/wA=", "data": 1}, "both"),
            ({"orderNumber": "7"}, "lower-case"),
            ({"order": 1.5}, "integers"),
        ],
    )
    def test_wrong_member(self, members: dict[str, Any], why: str) -> None:
        """An attribute that is missing or wrong is named."""
        with pytest.raises(ValueError, match=why):
            read(**members)

    @pytest.mark.parametrize("data", [{1, 2}, float("nan"), [object()]])
    def test_data_that_json_cannot_say(self, data: object) -> None:
        """Such data is refused when it is written, not sent as something else."""
        with pytest.raises(ValueError, match="data is not JSON"):
            Event(id="1", source="/shop", type="order.paid", data=data).to_json()


class TestTimes:
    @pytest.mark.parametrize(
        ("text", "time"),
        [
            ("2031-05-07t09:30:00z", datetime(2031, 5, 7, 9, 30, tzinfo=UTC)),
            ("2031-05-07T09:30:00+02:00", datetime(2031, 5, 7, 7, 30, tzinfo=UTC)),
            ("2031-05-07T09:30:00.123456789Z", datetime(2031, 5, 7, 9, 30, 0, 123456, UTC)),
        ],
    )
    def test_read(self, text: str, time: datetime) -> None:
        """All forms of RFC 3339 are read; what Python's times cannot hold is cut off."""
        assert read(time=text).time == time

    def test_no_zone(self) -> None:
        """A time needs a zone."""
        with pytest.raises(ValueError, match="time zone"):
            Event(id="1", source="/shop", type="order.paid", time=EARLIEST)
