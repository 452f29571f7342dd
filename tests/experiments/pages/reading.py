"""How tests read pages."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

HOSTILE = "</script><script>alert('1 & 2')</script><!-- {{ title }}"


class Read(HTMLParser):
    """What a browser would make of a page: its elements, its text, and what each script holds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.texts.append(data)

    @property
    def data(self) -> dict[str, Any]:
        """What the first script holds, as data."""
        found: dict[str, Any] = json.loads(self.scripts[0])
        return found

    def rows(self, tag: str) -> list[int]:
        """The rows that elements with a tag stand for, in their order."""
        return [int(str(of["data-row"])) for name, of in self.tags if name == tag and "data-row" in of]


def loads_nothing(text: str) -> None:
    """Assert that a page stands alone."""
    assert "://" not in text
    assert not re.search(r"url\(|@import|\bimport\b|\bfetch\b|XMLHttpRequest|innerHTML", text)
    for tag, attributes in Read(text).tags:
        assert tag not in {"link", "img", "image", "iframe", "base", "object", "embed", "use"}
        assert not {"src", "href", "xlink:href", "srcset", "action"} & attributes.keys()
    (policy,) = [a["content"] for tag, a in Read(text).tags if tag == "meta" and "http-equiv" in a]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
