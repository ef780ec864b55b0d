"""What Sphinx's search shows for a query: the ranking of its searchtools.js, over a built index."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sphinx.search.en import SearchEnglish

TITLE, PARTIAL_TITLE, TERM, PARTIAL_TERM = 15, 7, 5, 2
OBJECT_NAME, PART_OF_OBJECT_NAME = 11, 6
OBJECT_PRIORITY = {0: 15, 1: 5, 2: -5}

Hit = tuple[float, str, int]  # its score, its title, the number of its page


class Index:
    """The search index of a built site."""

    def __init__(self, site: Path) -> None:
        text = (site / "searchindex.js").read_text()
        self._index: dict[str, Any] = json.loads(text[text.index("{") : text.rindex("}") + 1])
        self._english = SearchEnglish({})

    def search(self, query: str) -> list[str]:
        """The pages of the hits, the best first, each page once."""
        query = query.strip().lower()
        words = [word for word in re.split(r"\W+", query) if word]
        hits = [*self._titles(query), *self._objects(words), *self._text(words)]
        main, others = self._entries(query)
        ranked = [*self._ranked([*hits, *main]), *self._ranked(others)]
        return list(dict.fromkeys(self._index["docnames"][number] for _, _, number in ranked))

    @staticmethod
    def _ranked(hits: Iterable[Hit]) -> list[Hit]:
        return sorted(hits, key=lambda hit: (-hit[0], hit[1].lower()))

    def _titles(self, query: str) -> Iterator[Hit]:
        titles = self._index["titles"]
        for title, places in self._index["alltitles"].items():
            if query in title.lower() and len(query) >= len(title) / 2:
                for number, _ in places:
                    whole = titles[number] == title
                    score = round(TITLE * len(query) / len(title)) + whole
                    yield score, title if whole else f"{titles[number]} > {title}", number

    def _entries(self, query: str) -> tuple[list[Hit], list[Hit]]:
        main: list[Hit] = []
        others: list[Hit] = []
        for entry, places in self._index["indexentries"].items():
            if query in entry and len(query) >= len(entry) / 2:
                for number, _, is_main in places:
                    score = round(100 * len(query) / len(entry))
                    hit = (score, self._index["titles"][number], number)
                    (main if is_main else others).append(hit)
        return main, others

    def _objects(self, words: list[str]) -> Iterator[Hit]:
        for prefix, members in self._index["objects"].items():
            for number, kind, priority, _, name in members:
                full = f"{prefix}.{name}" if prefix else name
                title, last = self._index["titles"][number], full.lower().rpartition(".")[2]
                text = f"{prefix} {name} {self._index['objnames'][str(kind)][2]} {title}".lower()
                for word in words:
                    if word not in full.lower() or any(other not in text for other in words):
                        continue
                    score = OBJECT_PRIORITY.get(priority, 0)
                    if word in (last, full.lower()):
                        score += OBJECT_NAME
                    elif word in last:
                        score += PART_OF_OBJECT_NAME
                    yield score, full, number

    def _text(self, words: list[str]) -> Iterator[Hit]:
        stems = {self._english.stem(word) for word in words if word not in self._english.stopwords}
        scores: dict[int, dict[str, int]] = {}
        wanted = {stem for stem in stems if not stem.isdecimal()}
        for stem in wanted:
            for numbers, score in self._places(stem):
                for number in [numbers] if isinstance(numbers, int) else numbers:
                    scores.setdefault(number, {})[stem] = score
        for number, found in scores.items():
            if len(found) in (len(wanted), sum(len(stem) > 2 for stem in wanted)):
                yield max(found.values()), self._index["titles"][number], number

    def _places(self, stem: str) -> Iterator[tuple[Any, int]]:
        tables = ("terms", TERM, PARTIAL_TERM), ("titleterms", TITLE, PARTIAL_TITLE)
        for table, whole, _ in tables:
            if stem in self._index[table]:
                yield self._index[table][stem], whole
        for table, _, part in tables:
            if len(stem) > 2 and stem not in self._index[table]:
                for term, numbers in self._index[table].items():
                    if stem in term:
                        yield numbers, part
