"""Reads a configuration file into keys: TOML, JSON, YAML, or text with flags.

What a file holds is data. No YAML tag makes an object, no shell line and no Python line is run, and no file that a file
names is opened.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import msgspec
import yaml

from sim.base.errors import InputError
from sim.base.presets import read_bytes

_MOST_BYTES, _MOST_LINE_BYTES, _MOST_KEYS = 2**18, 2**12, 4096
"""Of a file, of one of its lines, and in it. Configurations have a hundredth of it; parsers take the square of some."""
_MOST_VALUE = 1024
"""Characters of a value behind its shell variables, which name each other."""

_LARGE = 2**63
"""From where on numbers are no counts, and take long to write out."""


class File(NamedTuple):
    """What a file says."""

    path: str
    given: Mapping[str, str]
    """Its values by their keys, as ``shown``; keys in tables are dotted."""


def read(path: str, where: str = "`paths`") -> File:
    """Return the keys of a file; raises InputError for what is no configuration, or larger than any is, and for what
    cannot be read, with ``where`` another path is set.
    """
    return file_of(path, read_bytes("configuration", path, where))


def file_of(path: str, data: bytes) -> File:
    """Return the keys of a file by its content; raises InputError as ``read`` does."""
    if len(data) > _MOST_BYTES or max(map(len, data.splitlines()), default=0) > _MOST_LINE_BYTES:
        raise InputError(
            f"configuration {path!r}: expected at most {_MOST_BYTES} bytes, in lines of at most {_MOST_LINE_BYTES}"
        )
    parsed: Callable[[str], Any] = _FORMATS.get(path.rpartition(".")[2].lower(), _text)
    try:
        found = parsed(data.decode())
        if not isinstance(found, dict):
            raise TypeError("expected a table of keys")
        given = {key: shown(value) for key, value in _flat(found)}
    except (AttributeError, LookupError) as error:  # of PyYAML, which reads !!int "" by its first character
        raise InputError(f"configuration {path!r}: a value is not what its tag says; change it in that file") from error
    except (ArithmeticError, RecursionError, TypeError, ValueError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise InputError(f"configuration {path!r}: {said}; change it in that file") from error
    if not 0 < len(given) <= _MOST_KEYS:
        raise InputError(f"configuration {path!r} has {len(given)} keys: expected 1 to {_MOST_KEYS}")
    return File(path, given)


def shown(value: object) -> str:
    """Return a value as tables of values have it: true, 8, none, 0.5, or a text.

    >>> shown(True), shown(8.0), shown(None), shown("Full"), shown(["a", 2]), shown([["a", "b"], ["c"]])
    ('true', '8', 'none', 'Full', 'a 2', 'a b | c')
    """
    if isinstance(value, list):
        return (" | " if any(isinstance(one, list) for one in value) else " ").join(map(shown, value))
    if value is None or isinstance(value, bool) or (isinstance(value, str) and value in {"True", "False", "None"}):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < _LARGE:
        return str(int(value))
    return f"{value:#x}" if isinstance(value, int) and abs(value) >= _LARGE else str(value)


def _flat(table: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of tables within tables, dotted; an empty table is a value."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Reads YAML whose nodes each stand once: aliases, which few lines multiply to any size, are refused."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            self._refuse("an alias (*NAME), which is not read: write out what it stands for")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        count = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, number in count.items() if number > 1]:
            raise ValueError(f"the key {twice[0]!r} stands twice")
        return super().construct_mapping(node, deep)

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"line {self.peek_event().start_mark.line + 1} has {what}")


def _yaml(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _toml(text: str) -> Any:
    return msgspec.toml.decode(text)


def _json(text: str) -> Any:
    return msgspec.json.decode(text)


def _text(text: str) -> dict[str, Any]:
    """Return the keys of the arguments that Megatron-LM prints, of a recipe's assignments, or of a shell script."""
    if dumped := dict(re.findall(r"^(?:\S{1,20} )?[ \t]*(\w+) \.{2,} (.*)$", text, re.MULTILINE)):
        return dumped
    lines = re.findall(r"^[ \t]*(?:cfg|config|recipe)\.([\w.]+)[ \t]*=[ \t]*([^\s=#][^#\n]*)", text, re.MULTILINE)
    if lines:
        return {key: value.strip().strip("'\"") for key, value in lines}
    return dict(_of_words(_words(text)))


_FORMATS: dict[str, Callable[[str], Any]] = {"toml": _toml, "json": _json, "yaml": _yaml, "yml": _yaml}
"""By the end of a file's name; all else is text."""
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^{}$]*))?\})")


def _words(text: str) -> list[str]:
    """Return the words of a shell script, variables replaced as far as it sets them; those of texts that hold flags,
    too.
    """
    found, variables = list[str](), dict[str, str]()
    for word in _split(text):
        filled = _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], match[3] or match[0]), word)
        filled = filled if len(filled) <= _MOST_VALUE or len(filled) == len(word) else word
        name = re.match(r"([A-Za-z_]\w*)=(.*)", filled, re.DOTALL)
        if name is None:
            found.append(";" if "--" in filled and not word.startswith("--") else filled)  # read where it was set
        elif "--" in name[2]:
            found += [";", *_split(name[2]), ";"]
            variables[name[1]] = name[2][:_MOST_VALUE]
        else:
            found.append(";")
            variables[name[1]] = name[2]
    return found


def _split(text: str) -> list[str]:
    """Return words and punctuation, without comments; raises ValueError where a quotation does not end."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    return list(lexer)


def _of_words(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield flags with their values, dashes as underscores, and assignments such as model.seq_length=8192."""
    key, values = "", list[str]()
    for word in [*words, ";"]:
        is_value = not (re.match(r"-(?!\d)|[();<>|&]", word) or word.endswith(".py") or "[@]" in word or "[*]" in word)
        if is_value and key:
            values.append(word)
            continue
        if key:
            yield key, " ".join(values) or "true"
        key, values = "", []
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            values = [value] if equals else []
        elif assigned := re.fullmatch(r"([a-z_]\w*(?:\.\w+)+)=(.+)", word):
            yield assigned[1], assigned[2]
