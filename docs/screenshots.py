"""Takes the screenshots of the admin: ``make screenshots``. It needs Chromium.

A small shop takes orders, payments and webhooks in a database of its own. One process dies while it
pays, and one webhook fails until it is a dead letter.
"""

# ruff: noqa: E402, INP001, S106, S603  # a script in a folder of documents

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import django
from django.conf import settings

IMAGES = Path(__file__).parent / "_static"
LARGEST = 100_000
"""Bytes of an image."""

FOLDER = Path(tempfile.mkdtemp(prefix="screenshots-"))
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": FOLDER / "db.sqlite3"}},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    IDEMPOTENCY={
        "OUTBOX": {
            "orders": {"BACKEND": "local", "OPTIONS": {"consumers": [f"{__name__}.billing"]}}
        },
    },
    INSTALLED_APPS=[
        "django.contrib.admin",
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "django.contrib.messages",
        "django.contrib.sessions",
        "django.contrib.staticfiles",
        "idempotency_django",
        "idempotency_django.contrib.messaging",
    ],
    LOGGING_CONFIG=None,
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
        f"{__name__}.logged_in",
    ],
    ROOT_URLCONF=__name__,
    SECRET_KEY="for these pictures only",
    STATIC_URL="static/",
    TEMPLATES=[
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "APP_DIRS": True,
            "OPTIONS": {
                "context_processors": [
                    "django.template.context_processors.request",
                    "django.contrib.auth.context_processors.auth",
                    "django.contrib.messages.context_processors.messages",
                ]
            },
        }
    ],
    TIME_ZONE="UTC",
    USE_TZ=True,
)
django.setup()

from django.contrib import admin
from django.contrib.auth.models import User
from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.handlers.wsgi import WSGIHandler
from django.core.management import call_command
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
from django.db import connection
from django.db.models import DateTimeField, F
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template.response import TemplateResponse
from django.test import Client
from django.urls import path, reverse

from idempotency_django import Policy, idempotent
from idempotency_django.contrib.messaging import Consumer, Event, Stripe, WebhookReceiver, publish
from idempotency_django.contrib.messaging.models import InboxMessage, OutboxMessage
from idempotency_django.models import IdempotencyKey, IdempotencyStep

PAYMENT = Policy(mode="leased", on_interrupted="hold", required=True)
billing = Consumer("billing", policy=PAYMENT)


@billing.on("order.placed")
def charge(event: Event, execution: Any) -> None:
    execution.step("charge", lambda: f"ch_{event.data['amount']}")
    execution.step("receipt", lambda: "sent")


@idempotent(required=True)
def place(request: HttpRequest) -> HttpResponse:
    data = json.loads(request.body)
    publish("orders", data, type="order.placed", group=data["order"])
    return JsonResponse(data, status=201)


@idempotent(policy=PAYMENT)
def refund(request: HttpRequest) -> HttpResponse:
    execution = request.idempotency  # type: ignore[attr-defined]  # added by the decorator
    execution.step("reserve", lambda: "re_17")
    if b"crash" in request.body:
        os._exit(1)
    execution.step("refund", lambda: "paid back")
    return JsonResponse({"refund": "re_17"}, status=201)


class StripeHook(WebhookReceiver):
    source = "stripe"
    verifier = Stripe(["whsec_for_these_pictures_only"])
    max_attempts = 1


@StripeHook.on("invoice.paid")
def paid(event: Event) -> None:
    if event.data["data"]["object"]["customer"] == "cus_unknown":
        raise LookupError("There is no customer cus_unknown.")


def logged_in(get_response: Callable[[HttpRequest], HttpResponse]) -> Any:
    """Middleware: each request is Ann's, and its page has no header."""

    def as_ann(request: HttpRequest) -> HttpResponse:
        request.user = User.objects.get(username="ann")
        response = get_response(request)
        if isinstance(response, TemplateResponse):
            hidden = ", ".join(["#header", *hide])
            style = f"<style>{hidden} {{ display: none !important }}</style></head>".encode()
            response.content = response.content.replace(b"</head>", style)
        return response

    return as_ann


hide: list[str] = []
"""What the next page leaves out, as selectors of CSS."""
admin.site.enable_nav_sidebar = False
urlpatterns = [
    path("admin/", admin.site.urls),
    path("orders/", place),
    path("refunds/", refund),
    path("webhooks/stripe/", StripeHook.as_view()),
]


def post(address: str, key: str, **data: Any) -> None:
    client = Client(headers={"Idempotency-Key": key})
    client.post(address, data, content_type="application/json")


def trade() -> None:
    """Fill the tables."""
    call_command("migrate", verbosity=0)
    User.objects.create_superuser("ann", password="ann")
    for number in (17, 18, 18, 19, 19, 19):
        post("/orders/", f"order-{number}", order=f"order-{number}", amount=100 * number)
    call_command("run_messaging", "--once", verbosity=0)
    connection.close()
    if (child := os.fork()) == 0:
        post("/refunds/", "refund-11", order="order-11", note="crash")
    os.waitpid(child, 0)
    post("/refunds/", "refund-12", order="order-12")
    for number, customer in enumerate(("cus_1", "cus_unknown", "cus_3"), start=31):
        invoice = {"id": f"in_{number}", "customer": customer}
        event = {"id": f"evt_{number}", "type": "invoice.paid", "data": {"object": invoice}}
        body, json_type = json.dumps(event).encode(), "application/json"
        headers = StripeHook.verifier.sign(body)
        Client().post("/webhooks/stripe/", body, content_type=json_type, headers=headers)
    call_command("run_messaging", "--once", verbosity=0)
    for model in (IdempotencyKey, IdempotencyStep, InboxMessage, OutboxMessage):
        times = [field.name for field in model._meta.fields if isinstance(field, DateTimeField)]
        model.objects.update(**{name: F(name) - timedelta(minutes=20) for name in times})


@dataclass(frozen=True, slots=True)
class Page:
    """A page that is shown.

    Attributes:
        image: the name of its image.
        address: its path.
        height: of its window.
        hide: what is left out, as selectors of CSS.
    """

    image: str
    address: str
    height: int
    hide: tuple[str, ...] = ()


def pages() -> list[Page]:
    """The pages, after the tables were filled."""
    records = reverse("admin:idempotency_django_idempotencykey_changelist")
    inbox = reverse("admin:idempotency_messaging_inboxmessage_changelist")
    held = IdempotencyKey.objects.get(key="refund-11").pk
    order = IdempotencyKey.objects.get(key="order-17").pk
    above = (".breadcrumbs", "#content > h1", ".object-tools", "fieldset:has(.form-row)")
    return [
        Page("admin-records", records, 720),
        Page("admin-record", f"{records}{held}/change/", 690),
        Page("admin-timeline", f"{records}{order}/change/", 570, above),
        Page("admin-inbox", inbox, 450),
    ]


def smaller(png: bytes) -> bytes:
    """The image in the 256 colours that it has most of."""
    chunks, start = [], 8
    while start < len(png):
        length, kind = struct.unpack(">I4s", png[start : start + 8])
        chunks.append((kind, png[start + 8 : start + 8 + length]))
        start += length + 12
    width, height, _, form = struct.unpack(">IIBB", chunks[0][1][:10])
    data = zlib.decompress(b"".join(content for kind, content in chunks if kind == b"IDAT"))
    bytes_each = {2: 3, 6: 4}[form]
    pixels = [
        bytes(row[at : at + 3])
        for row in unfiltered(data, width * bytes_each, bytes_each)
        for at in range(0, len(row), bytes_each)
    ]
    colours = Counter(pixels)
    kept = [colour for colour, _ in colours.most_common(256)]
    index = {
        colour: min(range(len(kept)), key=lambda at: distance(kept[at], colour))
        for colour in colours
    }
    rows = [bytes(map(index.__getitem__, pixels[y * width :][:width])) for y in range(height)]
    new = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", b"".join(kept)),
        (b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows), 9)),
        (b"IEND", b""),
    ]
    return png[:8] + b"".join(
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in new
    )


def distance(one: bytes, other: bytes) -> int:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


def unfiltered(data: bytes, width: int, left: int) -> Iterator[bytearray]:
    """The rows of a PNG, in which each byte is stored as its difference from earlier ones."""
    above = bytearray(width)
    for start in range(0, len(data), width + 1):
        row = bytearray(data[start + 1 : start + 1 + width])
        for at in range(width):
            a, c = (row[at - left], above[at - left]) if at >= left else (0, 0)
            b = above[at]
            nearest = min((abs(b - c), 0, a), (abs(a - c), 1, b), (abs(a + b - 2 * c), 2, c))[2]
            row[at] = (row[at] + (0, a, b, (a + b) // 2, nearest)[data[start]]) & 255
        yield row
        above = row


class Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    """Write the images."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("There is no chromium, and no google-chrome.")
    logging.disable()  # a failure is shown, and expected
    trade()
    server = ThreadedWSGIServer(("127.0.0.1", 0), Quiet)
    server.set_app(StaticFilesHandler(WSGIHandler()))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for page in pages():
        hide[:] = page.hide
        image = FOLDER / f"{page.image}.png"
        command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--disable-lcd-text"]
        command += [f"--window-size=1080,{page.height}", f"--screenshot={image}"]
        url = f"http://127.0.0.1:{server.server_port}{page.address}"
        subprocess.run([*command, url], check=True, capture_output=True)
        png = smaller(image.read_bytes())
        print(f"{image.name}: {len(png):,} bytes")
        if len(png) > LARGEST:
            sys.exit(f"{image.name} has more than {LARGEST:,} bytes.")
        (IMAGES / image.name).write_bytes(png)
    shutil.rmtree(FOLDER)


if __name__ == "__main__":
    main()
