"""Events: CloudEvents 1.0, read and written as its JSON format and HTTP binding say."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, ClassVar

import pytest
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from idempotency_django.contrib.messaging import Event

STRUCTURED = "application/cloudevents+json"
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
    extensions=st.dictionaries(st.from_regex(r"x[a-z0-9]{0,8}", fullmatch=True), some_text),
)


def read(**members: Any) -> Event:
    return Event.from_json(json.dumps({**BASE, **members}))


class TestJson:
    def test_example_of_the_specification(self) -> None:
        """The example of the CloudEvents specification is read with all that it says."""
        event = Event.from_json("""{
            "specversion" : "1.0",
            "type" : "com.github.pull_request.opened",
            "source" : "https://github.com/cloudevents/spec/pull",
            "subject" : "123",
            "id" : "A234-1234-1234",
            "time" : "2018-04-05T17:31:00Z",
            "comexampleextension1" : "value",
            "comexampleothervalue" : 5,
            "datacontenttype" : "text/xml",
            "data" : "<much wow=\\"xml\\"/>"
        }""")
        assert event == Event(
            id="A234-1234-1234",
            source="https://github.com/cloudevents/spec/pull",
            type="com.github.pull_request.opened",
            subject="123",
            time=datetime(2018, 4, 5, 17, 31, tzinfo=UTC),
            datacontenttype="text/xml",
            data='<much wow="xml"/>',
            extensions={"comexampleextension1": "value", "comexampleothervalue": 5},
        )

    @few
    @given(events)
    def test_round_trip(self, event: Event) -> None:
        """What is written is read as the same event, in the JSON format and in the binary mode."""
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

    def test_bytes(self) -> None:
        """Bytes travel as data_base64."""
        event = Event(id="1", source="/shop", type="order.paid", data=b"\xff\x00")
        assert json.loads(event.to_json())["data_base64"] == "/wA="
        assert read(data_base64="/wA=") == event

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("", "not JSON"),
            (b"\xff", "not JSON in UTF-8"),
            ("[" * 100_000, "not JSON"),
            ("[" * 102 + "]" * 102, "more than 101 nested lists and objects"),
            (
                '{"data": [' + '{"a": [' * 50 + "]}" * 50 + "]}",
                "more than 101 nested lists and objects",
            ),
            ("[]", "list in JSON"),
            ("7", "int in JSON"),
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
            ({"id": ""}, "the id ''"),
            ({"id": 7}, "the id 7"),
            ({"source": None}, "no source"),
            ({"type": ["order.paid"]}, "non-empty string"),
            ({"subject": ""}, "the subject ''"),
            ({"time": "2018-04-05"}, "RFC 3339"),
            ({"time": "2018-13-05T17:31:00Z"}, "RFC 3339"),
            ({"time": 7}, "RFC 3339"),
            ({"data_base64": "?"}, "Base64"),
            ({"data_base64": 7}, "Base64"),
            ({"data_base64": "/wA=", "data": 1}, "both"),
            ({"orderNumber": "7"}, "lower-case"),
            ({"order": {"number": 7}}, "an integer"),
            ({"order": 1.5}, "an integer"),
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

    def test_written(self) -> None:
        """Times are written in UTC."""
        time = datetime(2031, 5, 7, 9, 30, tzinfo=timezone(timedelta(hours=2)))
        event = Event(id="1", source="/shop", type="order.paid", time=time)
        assert json.loads(event.to_json())["time"] == "2031-05-07T07:30:00Z"

    @pytest.mark.parametrize("time", [EARLIEST, "2031-05-07T09:30:00Z"])
    def test_no_time(self, time: Any) -> None:
        """A time needs a zone."""
        with pytest.raises(ValueError, match="time zone"):
            Event(id="1", source="/shop", type="order.paid", time=time)


class TestBinary:
    """Attributes in headers, and the data in the body."""

    NAMES: ClassVar = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t"}

    @pytest.mark.parametrize(
        ("kind", "body", "data"),
        [
            ("text/xml", b"<a/>", "<a/>"),
            ("application/json", b'{"a": [1, null]}', {"a": [1, None]}),
            ("application/vnd.shop+json; charset=utf-8", b'"text"', "text"),
            ("application/octet-stream", b"\x00", b"\x00"),
            ("text/plain", b"\xe9", b"\xe9"),
            ("", b"text", b"text"),
            ("application/json", b"", None),
        ],
    )
    def test_data(self, kind: str, body: bytes, data: Any) -> None:
        """The data are what the JSON format would carry; text in another charset stays bytes."""
        event = Event.from_binary(self.NAMES, kind, body)
        assert (event.data, event.datacontenttype) == (data, kind or None)
        assert Event.from_json(event.to_json()) == event

    def test_attributes(self) -> None:
        """Each attribute is a text, as it is."""
        more = {"time": "2031-05-07T09:30:00Z", "subject": '"a" %20', "causedby": "x"}
        event = Event.from_binary({**self.NAMES, **more}, "", b"")
        assert (event.subject, event.extensions) == ('"a" %20', {"causedby": "x"})
        assert event.time == datetime(2031, 5, 7, 9, 30, tzinfo=UTC)

    @pytest.mark.parametrize(
        ("names", "body", "why"),
        [
            ({}, b"", "no specversion"),
            ({"specversion": "1.0", "id": "1"}, b"", "no source"),
            (NAMES, b"{", "not JSON"),
        ],
    )
    def test_no_event(self, names: dict[str, str], body: bytes, why: str) -> None:
        """What is no event is refused with the reason."""
        with pytest.raises(ValueError, match=why):
            Event.from_binary(names, "application/json", body)
