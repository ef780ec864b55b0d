"""The texts that people read, and their translations: ``make messages`` finds and compiles them.

Each text in ``gettext()``, in a template, or in the title of an error goes to the ``django.po`` of
each language in ``idempotency_django/locale``. What is new has an empty translation there, which
``tests/test_translations.py`` refuses.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from babel.messages import Catalog
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po
from django.utils.translation.template import templatize

PACKAGE: Final = Path(__file__).parents[2] / "idempotency_django"
LOCALE: Final = PACKAGE / "locale"
LANGUAGES: Final = ("de", "es", "fr", "pt")
_FUNCTIONS: Final = frozenset({"_", "gettext", "gettext_lazy", "ngettext", "ngettext_lazy"})
_IN_TEMPLATE: Final = re.compile(
    r"""\b(?:_|n?gettext)\((?:[^'"()]|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")*\)"""
)

_UNCHANGED: Final = datetime(2026, 1, 1, tzinfo=UTC)
"""Of each file that is written: the same translations are the same file."""
_HEADER: Final = """\
msgid ""
msgstr ""
"Language: {}\\n"
"Plural-Forms: {}\\n"
"MIME-Version: 1.0\\n"
"Content-Type: text/plain; charset=utf-8\\n"
"Content-Transfer-Encoding: 8bit\\n"

"""

Text = str | tuple[str, str]
"""A text, or one for the singular and one for the plural."""


def texts() -> dict[Text, list[str]]:
    """Each text, with the files that it is in."""
    found: dict[Text, list[str]] = {}
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.html")]):
        for text in _texts_in(path):
            places = found.setdefault(text, [])
            name = path.relative_to(PACKAGE.parent).as_posix()
            if name not in places:
                places.append(name)
    return found


def _texts_in(path: Path) -> Iterator[Text]:
    source = path.read_text()
    if path.suffix == ".html":
        calls = _IN_TEMPLATE.findall(templatize(source))
        source = "\n".join(call.replace("%%", "%") for call in calls)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            titles = [each.value for each in node.keywords if each.arg == "title"]
            yield from (str(title.value) for title in titles if isinstance(title, ast.Constant))
        if isinstance(node, ast.Call) and _name(node.func) in _FUNCTIONS:
            texts = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
            if texts:
                yield (texts[0], texts[1]) if len(texts) > 1 else texts[0]


def _name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else ""


def po_file(language: str) -> Path:
    """The translations of a language, for people."""
    return LOCALE / language / "LC_MESSAGES" / "django.po"


def catalog(language: str) -> Catalog:
    """The translations of a language."""
    with po_file(language).open("rb") as file:
        return read_po(file, locale=language)


def update(language: str) -> int:
    """Write the translations again, with the texts that there are now; how many are missing."""
    path = po_file(language)
    known: Any = catalog(language) if path.exists() else Catalog(locale=language)
    now = Catalog(locale=language, creation_date=_UNCHANGED, revision_date=_UNCHANGED)
    for text, places in texts().items():
        message = known.get(text if isinstance(text, str) else text[0])
        old = message.string if message and message.id == text else None
        now.add(text, old or None, locations=[(place, None) for place in places])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(_HEADER.format(language, now.plural_forms).encode())
        write_po(file, now, width=100, omit_header=True, sort_output=True)
    with path.with_suffix(".mo").open("wb") as file:
        write_mo(file, now)
    return len(missing(language))


def missing(language: str) -> list[Text]:
    """The texts that have no translation."""
    return [each.id for each in catalog(language) if each.id and not all(_strings(each.string))]


def _strings(text: Any) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else text


if __name__ == "__main__":
    for each in LANGUAGES:
        print(f"{po_file(each).relative_to(PACKAGE.parent)}: {update(each)} texts to translate")
