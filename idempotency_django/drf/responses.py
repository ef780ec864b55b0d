"""Responses of REST framework's own class, whose bytes are ours."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from typing import Any, Final

from django.http import HttpResponse
from rest_framework.renderers import BaseRenderer, BrowsableAPIRenderer, HTMLFormRenderer
from rest_framework.response import Response

PAGES: Final = (BrowsableAPIRenderer, HTMLFormRenderer)
"""Renderers of pages, which name the user and hold the token of the forms on them."""


def is_page(negotiated: Any) -> bool:
    """Whether such a page was negotiated for a request, or made as its response."""
    return isinstance(getattr(negotiated, "accepted_renderer", None), PAGES)


class ProblemRenderer(BaseRenderer):
    """Problems have a media type of their own (RFC 9457), and one form for all frameworks."""

    media_type = "application/problem+json"
    charset = None

    def render(self, data: Any, *args: Any, **kwargs: Any) -> bytes:
        return json.dumps(data).encode()


def rendered_by(renderer: BaseRenderer, view: Any, response: Any) -> Response:
    """The content of a response, rendered by this renderer instead of the negotiated one."""
    made = Response(
        response.data,
        status=response.status_code,
        headers=response.headers,
        exception=response.exception,
        content_type=response.content_type,
    )
    del made["Content-Type"]
    made.cookies = response.cookies
    made.accepted_renderer = renderer
    made.accepted_media_type = renderer.media_type
    made.renderer_context = view.get_renderer_context()  # type: ignore[attr-defined]
    made.render()
    return made


def without_page(view: Any) -> BaseRenderer | None:
    """The renderer of the view's that a page of the browsable API shows the answer of."""
    for renderer in view.get_renderers():
        if not isinstance(renderer, PAGES) and not hasattr(renderer, "get_template_names"):
            return renderer  # type: ignore[no-any-return]
    return None


class StoredResponse(Response):
    """A response whose bytes are known already, with what they say in its ``data``.

    Args:
        stored: the status, the headers and the bytes.
    """

    def __init__(self, stored: HttpResponse) -> None:
        super().__init__(status=stored.status_code)
        del self.data  # what follows makes it when it is asked for
        self.headers = stored.headers
        self.reason_phrase = stored.reason_phrase
        self.content = stored.content
        if hasattr(stored, "url"):
            self.url = stored.url

    @cached_property
    def data(self) -> Any:
        """The data in the bytes, if they are JSON; else ``None``."""
        if not self.content or not is_json(self.items()):
            return None
        return json.loads(self.content)


def is_json(headers: Iterable[tuple[str, str]]) -> bool:
    for name, value in headers:
        if name.lower() == "content-type":
            media_type = value.partition(";")[0].strip().lower()
            return media_type == "application/json" or media_type.endswith("+json")
    return False
