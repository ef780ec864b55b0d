"""The form that an answer is written by hand in."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from django import forms
from django.contrib.admin.widgets import (
    AdminIntegerFieldWidget,
    AdminTextareaWidget,
    AdminTextInputWidget,
)
from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator
from django.utils.http import parse_header_parameters
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

BODILESS: Final = (204, 205, 304)
"""Status codes of answers that have no body (RFC 9110)."""

_NAME: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_MEDIA_TYPE: Final = re.compile(
    rf"{_NAME}/{_NAME}( *; *{_NAME}=({_NAME}|\"[ !#-\[\]-~]*\"))*\Z"  # RFC 9110, section 8.3.1
)


class AnswerForm(forms.Form):
    """Status code, content type and body of an answer, such as a handler could have given."""

    status = forms.IntegerField(
        label=gettext_lazy("Status code"),
        min_value=200,
        max_value=499,
        initial=200,
        widget=AdminIntegerFieldWidget,
    )
    content_type = forms.CharField(
        label=gettext_lazy("Content type"),
        max_length=255,
        initial="application/json",
        required=False,
        validators=[
            RegexValidator(
                _MEDIA_TYPE, gettext_lazy("Enter a media type, for example application/json.")
            )
        ],
        widget=AdminTextInputWidget,
    )
    body = forms.CharField(
        label=gettext_lazy("Body"),
        help_text=gettext_lazy("Stored as it is, in UTF-8."),
        required=False,
        strip=False,
        widget=AdminTextareaWidget(attrs={"rows": 12, "spellcheck": "false"}),
    )

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """The answer's headers, once it is valid."""
        media_type = self.cleaned_data["content_type"]
        if not media_type or self.cleaned_data["status"] in BODILESS:
            return ()
        return (("Content-Type", media_type),)

    @property
    def content(self) -> bytes:
        """The answer's body, once it is valid."""
        body: str = self.cleaned_data["body"]
        return body.encode()

    def clean_content_type(self) -> str:
        """A type that says the truth of a body in UTF-8."""
        declared: str = self.cleaned_data["content_type"]
        media_type, parameters = parse_header_parameters(declared)
        charset = parameters.get("charset")
        if charset is None and media_type.startswith("text/"):
            return f"{declared}; charset=utf-8"
        if charset is not None and charset.lower() not in ("utf-8", "utf8"):
            raise ValidationError(_("The body is stored in UTF-8: leave the charset out."))
        return declared

    def clean_body(self) -> str:
        """The text that was entered: browsers send each of its line ends as two characters."""
        entered: str = self.cleaned_data["body"]
        return entered.replace("\r\n", "\n")

    def clean(self) -> dict[str, Any]:
        body, given = self.cleaned_data.get("body"), self.cleaned_data
        if body and given.get("status") in BODILESS:
            self.add_error("body", _("An answer with this status code has no body."))
        if body and given.get("content_type") == "":
            self.add_error("content_type", _("Enter the media type of the body."))
        media_type, _parameters = parse_header_parameters(given.get("content_type", ""))
        bodiless = given.get("status") in BODILESS
        if body is not None and not bodiless and media_type.endswith(("/json", "+json")):
            self._check_json(body)
        return given

    def _check_json(self, body: str) -> None:
        if not body:
            self.add_error("body", _("Enter JSON, such as null, or leave out the content type."))
            return
        try:
            json.loads(body)
        except (ValueError, RecursionError) as error:
            self.add_error("body", _("This is not JSON: %(error)s.") % {"error": error})
