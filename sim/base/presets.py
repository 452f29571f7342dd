"""Named presets and the user's own files, decoded into Structs.

Clusters, models and profiles are all read by the functions below, so that an unknown name, a missing file, an unknown
key and a wrong value read alike everywhere. ``overrides`` changes figures of what was read.
"""

from __future__ import annotations

import codecs
import re
import reprlib
import stat
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from sim.base.errors import InputError, none_of, unknown

T = TypeVar("T", bound=msgspec.Struct)

PLAIN = "a text without control characters"
"""What messages say of a pattern that takes all others."""
Name = Annotated[
    str,
    msgspec.Meta(min_length=1, max_length=200, pattern=r"\A[^\x00-\x1f\x7f-\x9f]*\Z", description=PLAIN),
]
"""What titles and tables show."""
MOST_BYTES = 256 * 2**20
"""Of a file that is read whole: the largest ones, records of sweeps, have some MB."""
_MOST_TOML_BYTES, _MOST_LINE_BYTES = 2**20, 4096
"""Of a TOML file and of one of its lines: the parser takes the square of a key's length."""
_KINDS = {
    "int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "array": "a list",
    "object": "a table", "null": "nothing",
}  # fmt: skip
"""What msgspec's names of types are called here."""


def preset_names(folder: str, suffix: str = ".toml") -> list[str]:
    """Return the names of the presets that ship in ``folder`` (``package/subfolder``), sorted; none is no error."""
    return [*_preset_names(folder, suffix)]


@lru_cache(maxsize=64)
def _preset_names(folder: str, suffix: str) -> tuple[str, ...]:
    package, _, sub = folder.partition("/")
    place = resources.files(package).joinpath(sub)
    files = place.iterdir() if place.is_dir() else ()
    return tuple(sorted(f.name.removesuffix(suffix) for f in files if f.name.endswith(suffix)))


def load_toml(what: str, name: str, struct: type[T], folder: str, where: str) -> T:
    """Return the ``struct`` that the preset or the TOML file called ``name`` describes.

    Raises InputError if there is no such preset or file, or if a key or a value does not fit ``struct``.
    """
    if not (name.endswith(".toml") or "/" in name):
        if name not in preset_names(folder):
            raise unknown(what, name, [*preset_names(folder), "FILE.toml"], where)
        return converted(_shipped(name, folder), struct, f"{what} {name!r}", "change it in that file")
    return from_toml(read_bytes(what, name, where), struct, what, name, where)


def from_toml(data: bytes, struct: type[T], what: str, name: str, where: str) -> T:
    """Return the ``struct`` that the content of the TOML file ``name`` describes; raises InputError as ``load_toml``
    does.
    """
    if len(data) > _MOST_TOML_BYTES or max(map(len, data.splitlines()), default=0) > _MOST_LINE_BYTES:
        raise InputError(
            f"{what} {name!r}: expected a TOML file of at most {_MOST_TOML_BYTES} bytes, in lines of at most "
            f"{_MOST_LINE_BYTES}"
        )
    try:
        decoded = msgspec.toml.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{what} {name!r}: {error}; change it in that file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{what} {name!r} is not a text file; {where} takes a TOML file") from error
    return converted(decoded, struct, f"{what} {name!r}", "change it in that file")


@lru_cache(maxsize=256)
def _shipped(name: str, folder: str) -> object:
    """Return what a preset's file holds, which nobody changes: sweeps ask for the same one again and again."""
    package, _, sub = folder.partition("/")
    return msgspec.toml.decode(resources.files(package).joinpath(sub, f"{name}.toml").read_bytes())


def read_bytes(what: str, path: str, where: str) -> bytes:
    """Return the content of a file that the user named; raises InputError if it cannot be read, or is no file."""
    wrong = ""
    try:
        found = Path(path).stat()
        if not stat.S_ISREG(found.st_mode):
            wrong = "it is no regular file"
        elif found.st_size > MOST_BYTES:
            wrong = f"it has {found.st_size} bytes, more than {MOST_BYTES}"
        else:
            return Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)  # as Windows' editors write
    except OSError as error:
        wrong = str(error.strerror)
    except ValueError as error:  # a path with a NUL byte, or with what is no character
        wrong = str(error)
    file = what if what.endswith("file") else f"{what} file"
    raise InputError(f"{file} {path!r} cannot be read ({wrong}); set it with {where}")


def from_json(data: bytes, struct: type[T], what: str, advice: str) -> T:
    """Return the ``struct`` that JSON describes; raises InputError as ``converted`` does, and for what is no JSON."""
    return converted(decoded(data, what, advice), struct, what, advice, strict=True)


def decoded(data: bytes, what: str, advice: str) -> object:
    """Return what JSON holds; raises InputError between ``what`` was read and an ``advice`` for what is no JSON."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InputError(f"{what}: {error}; {advice}") from error


def converted(data: object, struct: type[T], what: str, advice: str, *, strict: bool = False) -> T:
    """Return the ``struct`` that decoded data describes; unless ``strict``, texts may stand for numbers.

    Raises InputError that names the key, what stands there and what is allowed, between ``what`` was read and an
    ``advice`` where to change it.
    """
    try:
        return msgspec.convert(data, struct, strict=strict, str_keys=True)
    except msgspec.ValidationError as error:
        raise InputError(f"{what}: {explained(error, struct, data)}; {advice}") from error


def explained(error: msgspec.ValidationError, owner: Any, data: object) -> str:
    """Return in words of this project what msgspec says of ``data`` that does not fit the type ``owner``.

    Without ``data`` whoever asks has named already what does not fit.
    """
    said, path = told(error)
    steps = re.findall(r"[^.\[\]]+|\[[^\]]*\]", path)
    at, value = _hint(owner, steps), _value(data, steps)
    given = f"{path} is {reprlib.repr(value)}: " if isinstance(value, str | int | float) else f"{path}: "
    given = "" if data is None or not path else given
    if match := re.fullmatch(r"Object contains unknown field `(.*)`", said):
        fields = [name for one in _alternatives(at) for name in getattr(one, "__struct_fields__", ())]
        return (f"{path}: " if path else "") + none_of("key", match[1], fields)
    if match := re.fullmatch(r"Object missing required field `(.*)`", said):
        return f"the key {'.'.join(filter(None, (path, match[1])))} is missing"
    if re.match("Invalid enum value", said):
        return f"{given}allowed are {', '.join(str(one) for kind in _alternatives(at) for one in get_args(kind))}"
    if re.match("Invalid value", said):
        structs = [one for one in _alternatives(_hint(owner, steps[:-1])) if hasattr(one, "__struct_config__")]
        return f"{given}allowed are {', '.join(str(one.__struct_config__.tag) for one in structs)}"
    if re.match("Expected `str` matching", said):
        return f"{given}expected {_described(owner, steps)}"
    if match := re.fullmatch(r"Expected `str` of length (\S+) (\d+)", said):
        return f"{path}: expected a text whose length is {match[1]} {match[2]}"
    if match := re.fullmatch(r"Expected `([\w |]+)`(?: ((?:>|<)=? \S+?)(?:\.0)?)?(?:, got `.*`)?", said):
        kinds = " or ".join(_KINDS.get(kind, kind) for kind in match[1].split(" | ") if kind != "null")
        return f"{given}expected {' '.join(filter(None, (kinds, match[2])))}"
    return f"{given and f'{path}: '}{said}"


def told(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return what msgspec says, and the path of fields to where."""
    match = re.fullmatch(r"(.*?)(?: - at (?:`key` in )?`\$\.?([^`]*)`)?", str(error), re.DOTALL)
    assert match is not None
    return match[1], match[2] or ""


def _value(data: Any, steps: Sequence[str]) -> object:
    """Return what stands at the end of a path; None where msgspec does not say which of several it is."""
    for step in steps:
        if isinstance(data, dict):
            data = data.get(step)
        elif isinstance(data, list) and step.strip("[]").isdecimal():
            data = data[int(step.strip("[]"))]
        else:
            return None
    return data


def _hint(owner: Any, steps: Sequence[str]) -> Any:
    """Return the type at the end of a path of fields and elements; None if there is none such."""
    for step in steps:
        hints = []
        for one in _alternatives(owner):
            if get_origin(one) in {dict, list, tuple}:
                hints.append(get_args(one)[1 if get_origin(one) is dict else 0])
            elif isinstance(one, type):
                hints.append(get_type_hints(one).get(step))
        owner = next((hint for hint in hints if hint is not None), None)
    return owner


def _described(owner: Any, steps: Sequence[str]) -> str:
    """Return what the type of a text says of those that its pattern takes: the description of its ``Meta``."""
    *before, last = steps or ("",)
    kinds = [one for one in _alternatives(_hint(owner, before)) if isinstance(one, type)]
    hints = [get_type_hints(kind, include_extras=True).get(last) for kind in kinds]
    metas = [meta for hint in hints for one in (hint, *get_args(hint)) for meta in getattr(one, "__metadata__", ())]
    return next((meta.description for meta in metas if meta.description), "a text of another form")


def _alternatives(owner: Any) -> list[Any]:
    """Return a type, or of a union its types."""
    return [owner] if get_origin(owner) in {None, dict, list, tuple, Literal} else list(get_args(owner))
