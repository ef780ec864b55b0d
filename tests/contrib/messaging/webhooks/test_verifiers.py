"""Verifiers: what the vendors' own libraries sign and refuse, and what nobody should send."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote_plus

import pytest
import standardwebhooks
import stripe
import svix
from django.core.exceptions import ImproperlyConfigured
from django.utils.datastructures import CaseInsensitiveMapping
from hypothesis import given, settings
from hypothesis import strategies as st

from idempotency_django.contrib.messaging.errors import DeliveryMalformed, SignatureRefused
from idempotency_django.contrib.messaging.verifiers import (
    Contents,
    GitHub,
    Hmac,
    StandardWebhooks,
    Stripe,
    Verifier,
)

from .receivers import SECRETS

OLD, NEW, FOREIGN = SECRETS
SNAPSHOT = {
    "id": "evt_1NG8Du2eZvKYlo2CUI79vXWy",
    "object": "event",
    "created": 1686089970,
    "data": {"object": {"id": "in_17", "metadata": {"reference": "r"}}},
    "pending_webhooks": 1,
    "type": "invoice.paid",
}
THIN = {
    "id": "evt_test_65R9Ijk8dKEYZcXeRWn16R9A7j1FSQ3w3TGDPLLGSM4CW0",
    "object": "v2.core.event",
    "type": "v1.billing.meter.error_report_triggered",
    "related_object": {"id": "mtr_17", "url": "/v1/billing/meters/mtr_17"},
}
PUSH = {"ref": "refs/heads/main", "commits": [{"id": "6dcb09b"}], "repository": {"id": 1296269}}

VERIFIERS: dict[str, Callable[..., Verifier]] = {
    "standard": StandardWebhooks,
    "svix": lambda secrets, **options: StandardWebhooks(secrets, prefix="svix-", **options),
    "stripe": Stripe,
    "github": lambda secrets, **_: GitHub(secrets),
    "hmac": lambda secrets, **options: Hmac(
        secrets,
        header="X-Signature",
        prefix="v0=",
        signed="v0:{timestamp}:{id}:{body}",
        timestamp_header="X-Timestamp",
        id_header="X-Id",
        type_path="type",
        **options,
    ),
    "shopify": lambda secrets, **_: Hmac(
        secrets,
        header="X-Shopify-Hmac-Sha256",
        encoding="base64",
        id_header="X-Shopify-Webhook-Id",
        type_header="X-Shopify-Topic",
    ),
}
every = pytest.mark.parametrize("make", VERIFIERS.values(), ids=VERIFIERS)
stamped = pytest.mark.parametrize(
    "make", [VERIFIERS[name] for name in ("standard", "svix", "stripe", "hmac")]
)


def cased(headers: dict[str, str]) -> Any:
    return CaseInsensitiveMapping(headers)


def raw(data: Any) -> bytes:
    return json.dumps(data).encode()


@pytest.mark.parametrize("secret", [NEW, OLD])
@pytest.mark.parametrize(
    ("library", "prefix"), [(standardwebhooks, "webhook-"), (svix, "svix-")], ids=lambda each: ""
)
def test_standard_oracle(library: Any, prefix: str, secret: str) -> None:
    """What the library of Standard Webhooks signs, or Svix, is verified, and vice versa."""
    at, body = datetime.now(UTC), raw({"type": "order.paid", "data": {"id": 17}})
    theirs = library.Webhook(secret)
    verifier = StandardWebhooks([NEW, OLD], prefix=prefix)
    headers = {
        f"{prefix}Id": "msg_1",
        f"{prefix}Timestamp": str(int(at.timestamp())),
        f"{prefix}Signature": "v1a,xx " + theirs.sign("msg_1", at, body.decode()),
    }
    verifier.verify(cased(headers), body)
    assert verifier.read(cased(headers), body) == Contents(
        "msg_1", "order.paid", {"type": "order.paid", "data": {"id": 17}}
    )
    ours = StandardWebhooks([secret], prefix=prefix).sign(body, message_id="msg_2")
    theirs.verify(body.decode(), ours)  # it raises nothing


@pytest.mark.parametrize("event", [SNAPSHOT, THIN], ids=["snapshot", "thin"])
def test_stripe_oracle(event: dict[str, Any]) -> None:
    """What Stripe's library signs is verified, snapshot or thin, and the other way round."""
    body, at = raw(event), int(time.time())
    signature = stripe.WebhookSignature._compute_signature(f"{at}.{body.decode()}", NEW)
    headers = cased({"Stripe-Signature": f"t={at},v1=00,v1={signature},v0=11"})
    verifier = Stripe([OLD, NEW])
    verifier.verify(headers, body)
    assert verifier.read(headers, body) == Contents(event["id"], event["type"], event)
    ours = Stripe([NEW]).sign(body)["Stripe-Signature"]
    assert stripe.WebhookSignature.verify_header(body.decode(), ours, NEW, tolerance=300)


@pytest.mark.parametrize("form", [False, True], ids=["json", "form"])
def test_github(form: bool) -> None:
    """GitHub's signature as its documentation makes it, on JSON and on a form."""
    body = b"payload=" + quote_plus(raw(PUSH)).encode() if form else raw(PUSH)
    delivery = "72d3162e-cc78-11e3-81ab-4c9367dc0958"
    signature = hmac.new(NEW.encode(), body, hashlib.sha256).hexdigest()
    headers = cased(
        {
            "Content-Type": f"application/{'x-www-form-urlencoded' if form else 'json'}",
            "X-GitHub-Event": "push",
            "X-GitHub-Delivery": delivery,
            "X-Hub-Signature-256": f"sha256={signature}",
        }
    )
    verifier = GitHub([OLD, NEW])
    verifier.verify(headers, body)
    assert verifier.read(headers, body) == Contents(delivery, "push", PUSH)


@every
def test_rotation(make: Any) -> None:
    """Each of the secrets is accepted, in any order, and no other."""
    body = raw({"id": "1", "type": "order.paid"})
    for signed_with in (OLD, NEW):
        headers = cased(make([signed_with]).sign(body, message_id="m"))
        make([NEW, OLD]).verify(headers, body)
        make(lambda: [OLD, NEW]).verify(headers, body)
    with pytest.raises(SignatureRefused):
        make([NEW, OLD]).verify(cased(make([FOREIGN]).sign(body, message_id="m")), body)


@stamped
@pytest.mark.parametrize("skew", [-301, 301])
def test_clock_skew(make: Any, skew: int) -> None:
    """What was signed more than five minutes away from now is refused, unless that is allowed."""
    body = raw({"id": "1", "type": "order.paid"})
    verifier, now = make([NEW]), time.time()
    verifier.verify(cased(verifier.sign(body, timestamp=now + skew * 0.9)), body)
    late = cased(verifier.sign(body, timestamp=now + skew + skew / 30))
    with pytest.raises(SignatureRefused, match="seconds from"):
        verifier.verify(late, body)
    make([NEW], tolerance=None).verify(late, body)
    make([NEW], tolerance=timedelta(hours=1)).verify(late, body)


@every
def test_tampered(make: Any) -> None:
    """Another body, another header, or none of it: refused."""
    body = raw({"id": "1", "type": "order.paid"})
    verifier = make([NEW])
    good = verifier.sign(body, message_id="m", timestamp=time.time())
    verifier.verify(cased(good), body)
    with pytest.raises(SignatureRefused):
        verifier.verify(cased(good), body + b" ")
    signed = [name for name in good if verifier.signs_id or "id" not in name.lower()]
    for name in signed if type(verifier) is not GitHub else ["X-Hub-Signature-256"]:
        for value in ("", good[name][:-1], good[name] + "é", "\ud800"):
            with pytest.raises(SignatureRefused):
                verifier.verify(cased({**good, name: value}), body)
    with pytest.raises(SignatureRefused):
        verifier.verify(cased({}), body)


HOSTILE = st.one_of(st.text(max_size=60), st.text("0123456789=,.v1tabcdef ", max_size=60))


@every
@settings(max_examples=150, deadline=None)
@given(data=st.data(), body=st.binary(max_size=80))
def test_hostile(make: Any, data: Any, body: bytes) -> None:
    """Whatever the headers and the body are: it is refused as not signed, and never an error."""
    verifier = make([NEW, OLD])
    names = verifier.sign(b"", message_id="m")
    headers = cased({name: data.draw(HOSTILE, name) for name in names})
    with pytest.raises(SignatureRefused):
        verifier.verify(headers, body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "type", "event"]) | st.text(max_size=5), inner)
    ),
    max_leaves=8,
)


@every
@settings(max_examples=150, deadline=None)
@given(body=st.binary(max_size=80) | JSON.map(lambda data: json.dumps(data).encode()))
def test_odd_bodies(make: Any, body: bytes) -> None:
    """A body that is signed is read, or refused as malformed, whatever is in it."""
    verifier = make([NEW])
    headers = cased(verifier.sign(body, message_id="m"))
    verifier.verify(headers, body)
    try:
        contents = verifier.read(headers, body)
    except DeliveryMalformed:
        return
    assert contents.message_id
    assert contents.type.isascii()


def test_hmac_ids() -> None:
    """The id is in a header, in the body, or is the body's digest."""
    body = raw({"event": {"id": 17, "kind": "order.paid"}})
    by_path = Hmac([NEW], header="X", id_path="event.id", type_path="event.kind")
    contents = by_path.read(cased({}), body)
    assert (contents.message_id, contents.type, by_path.signs_id) == ("17", "order.paid", True)
    by_header = Hmac([NEW], header="X", id_header="X-Id")
    assert by_header.read(cased({"x-id": "m"}), body).message_id == "m"
    assert not by_header.signs_id
    by_body = Hmac([NEW], header="X")
    first, again = (by_body.read(cased({}), body).message_id for _ in range(2))
    assert first == again != by_body.read(cased({}), body + b" ").message_id
    assert by_body.signs_id
    for missing in (by_path, by_header):
        with pytest.raises(DeliveryMalformed, match="no valid id"):
            missing.read(cased({}), b"{}")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"digest": "md5"}, "digest='md5'"),
        ({"encoding": "utf-8"}, "encoding='utf-8'"),
        ({"signed": "{url}{body}"}, "{url}"),
        ({"signed": "v0"}, "without {body}"),
        ({"signed": "{timestamp}{body}"}, "no timestamp_header"),
        ({"timestamp_header": "X-Time"}, "without {timestamp}"),
        ({"signed": "{id}{body}"}, "no id_header"),
        ({"id_header": "X-Id", "id_path": "id"}, "both id_header"),
        ({"type_header": "X-Type", "type_path": "type"}, "both type_header"),
    ],
)
def test_hmac_contradictions(options: Any, why: str) -> None:
    """An Hmac that could not work, or protects nothing, is refused when it is made."""
    with pytest.raises(ImproperlyConfigured, match=why):
        Hmac([NEW], header="X", **options)


@every
@pytest.mark.parametrize(
    "none", [[], [""], [" "], [NEW.encode()], [None], list, lambda: None, NEW, lambda: NEW]
)
def test_secrets(make: Any, none: Any) -> None:
    """Without a secret nothing is verified; an empty one is none, and one text is a mistake."""
    body = b"{}"
    headers = cased(make([NEW]).sign(body, message_id="m"))
    with pytest.raises(
        ImproperlyConfigured, match=r"has (no list of secrets|a secret that cannot)"
    ):
        make(none).verify(headers, body)


@every
def test_empty_secret(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is signed with the empty key, as anybody can, is not verified beside a good secret."""
    body, forger = b"{}", make([NEW])
    monkeypatch.setattr(forger, "keys", lambda: [b""])
    forged = cased(forger.sign(body, message_id="m"))
    for secrets in ([""], ["", NEW], [NEW, ""]):
        with pytest.raises(ImproperlyConfigured, match="is empty"):
            make(secrets).verify(forged, body)
