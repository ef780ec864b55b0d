"""The translations are complete, compiled, and used."""

from __future__ import annotations

import gettext
import re
from typing import Any

import pytest
from django.urls import path
from django.utils import translation

from idempotency_django import idempotent
from tests.support import translations
from tests.support.translations import LANGUAGES

HOW = "Run `make messages`, translate what is empty in {}, and run it again."


@pytest.mark.parametrize("language", LANGUAGES)
def test_complete(language: str) -> None:
    """Each text is there, and no other; all are translated, and none is marked as fuzzy."""
    catalog, file = translations.catalog(language), translations.po_file(language)
    how = HOW.format(file)
    assert {message.id for message in catalog if message.id} == translations.texts().keys(), how
    assert translations.missing(language) == [], how
    assert not [message.id for message in catalog if message.fuzzy and message.id], file


@pytest.mark.parametrize("language", LANGUAGES)
def test_placeholders(language: str) -> None:
    """A translation has the placeholders and the markup of its text."""
    placeholder = re.compile(r"%\(\w+\)[sd]|</?code>|derive_key\(.*?\)")
    for message in translations.catalog(language):
        if message.id:
            text = message.id if isinstance(message.id, str) else message.id[-1]
            string = message.string if isinstance(message.string, str) else message.string[-1]
            assert sorted(placeholder.findall(string)) == sorted(placeholder.findall(text))


@pytest.mark.parametrize("language", LANGUAGES)
def test_compiled(language: str) -> None:
    """What Django reads is what people have written."""
    with translations.po_file(language).with_suffix(".mo").open("rb") as file:
        compiled = gettext.GNUTranslations(file)
    for message in translations.catalog(language):
        if isinstance(message.id, str) and message.id:
            assert compiled.gettext(message.id) == message.string, HOW.format(language)


@idempotent(required=True)
def pay(request: Any) -> Any:
    raise AssertionError


urlpatterns = [path("", pay)]


@pytest.mark.urls(__name__)
def test_problem(client: Any) -> None:
    """The title of a problem is in the language of the request; its type and code stay."""
    with translation.override("de"):
        problem = client.post("/").json()
    assert problem["title"] == "Idempotenzschlüssel erforderlich"
    assert (problem["code"], problem["status"]) == ("key-missing", 400)


def test_dialect_of_a_language() -> None:
    """Brazil's Portuguese has the texts of Portuguese."""
    with translation.override("pt-br"):
        assert translation.gettext("idempotency key") == "chave de idempotência"
