"""Events: CloudEvents 1.0, read and written as its JSON format and HTTP binding say."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_binary, to_binary
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
        assert Event.from_cloudevent(theirs) == event
        assert Event.from_json(JSONFormat().write(event.to_cloudevent())) == event

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
            ("[]", "JSON array"),
            ("7", "JSON number"),
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
            ({"id": ""}, "an empty id"),
            ({"id": 7}, "the id 7, which is not a string"),
            ({"source": None}, "no source"),
            ({"type": ["order.paid"]}, "not a string"),
            ({"subject": ""}, "an empty subject"),
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
            ("2016-12-31T23:59:60Z", datetime(2016, 12, 31, 23, 59, 59, tzinfo=UTC)),
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


class TestHttp:
    @few
    @given(events)
    def test_binary_round_trip(self, event: Event) -> None:
        """The binary mode carries the same event."""
        assert Event.from_http(*event.to_http()) == (
            event
            if event.data is None or isinstance(event.data, bytes)
            else Event(**_parts(event), datacontenttype="application/json")
        )

    @few
    @given(events)
    def test_the_reference_implementation_agrees(self, event: Event) -> None:
        """The package of the CloudEvents project reads the headers, and the other way round."""
        headers, body = event.to_http()
        theirs = Event.from_cloudevent(
            from_binary(HTTPMessage(headers, body), JSONFormat(), CloudEvent)
        )
        ours = Event.from_http(headers, body)
        for name in ("id", "source", "type", "subject", "time", "extensions"):
            assert getattr(theirs, name) == getattr(event, name)
        message = to_binary(ours.to_cloudevent(), JSONFormat())
        again = Event.from_http(message.headers, body)  # they write most JSON as Python's repr()
        assert (again.id, again.source, again.extensions) == (ours.id, ours.source, ours.extensions)

    def test_structured(self) -> None:
        """A body of the JSON format is the event; its headers say nothing of it."""
        headers = {"Content-Type": f"{STRUCTURED}; charset=utf-8", "ce-id": "other"}
        assert Event.from_http(headers, json.dumps(BASE).encode()).id == "1"

    def test_plain_json(self) -> None:
        """A sender that cannot choose the media type is understood."""
        headers = {"Content-Type": "application/json"}
        assert Event.from_http(headers, json.dumps(BASE).encode()) == read()

    def test_both_modes_carry_the_same_data(self) -> None:
        """An event that is sent again in the other mode has the same data, whatever its type."""
        for kind, data in [
            ("text/xml", "<a/>"),
            ("image/svg+xml", "<a/>"),
            ("application/json", {"a": [1, None]}),
            ("application/json", "text"),
            ("application/octet-stream", b"\x00"),
        ]:
            event = Event(id="1", source="/s", type="t", datacontenttype=kind, data=data)
            assert Event.from_http(*event.to_http()) == event == Event.from_json(event.to_json())

    def test_text_in_another_charset(self) -> None:
        """Text that is not UTF-8 stays bytes."""
        headers = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/s", "ce-type": "t"}
        event = Event.from_http({**headers, "Content-Type": "text/plain"}, b"\xe9")
        assert event.data == b"\xe9"

    def test_headers_are_percent_decoded(self) -> None:
        """Values are percent-decoded, with or without quotes (HTTP binding, section 3.1.3.2)."""
        headers = {"CE-SpecVersion": "1.0", "ce-source": "/s", "ce-type": '"a \\"b\\" %25"'}
        event = Event.from_http({**headers, "ce-id": "Euro%20%E2%82%AC%20%F0%9F%98%80"}, b"")
        assert (event.id, event.type) == ("Euro € 😀", 'a "b" %')

    def test_truth_values(self) -> None:
        """A truth value is written as CloudEvents writes it."""
        event = Event(id="1", source="/s", type="t", extensions={"late": True, "tries": 3})
        assert event.to_http()[0]["ce-late"] == "true"

    @pytest.mark.parametrize(
        ("headers", "body", "why"),
        [
            ({}, b"", "no specversion"),
            ({"Content-Type": "application/cloudevents-batch+json"}, b"[]", "not supported"),
            ({"Content-Type": "application/cloudevents+avro"}, b"", "not supported"),
            ({"Content-Type": STRUCTURED}, b"{", "not JSON"),
            ({"ce-id": "%FF"}, b"", "percent-encoded"),
            ({"ce-specversion": "1.0", "ce-id": "1"}, b"", "no source"),
            ({"ce-specversion": "1.0", "Content-Type": "application/json"}, b"{", "not JSON"),
        ],
    )
    def test_no_event(self, headers: dict[str, str], body: bytes, why: str) -> None:
        """What is no event is refused with the reason."""
        with pytest.raises(ValueError, match=why):
            Event.from_http(headers, body)


def test_another_version_of_the_package() -> None:
    """An event of another version of CloudEvents is refused, not misread."""
    from cloudevents.core.v03.event import CloudEvent as Old

    old = Old({"id": "1", "source": "/s", "type": "t", "specversion": "0.3"}, None)
    with pytest.raises(ValueError, match=r"specversion '0\.3'"):
        Event.from_cloudevent(old)


def _parts(event: Event) -> dict[str, Any]:
    names = ("id", "source", "type", "data", "subject", "time", "extensions")
    return {name: getattr(event, name) for name in names}
