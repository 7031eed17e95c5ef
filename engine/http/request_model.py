"""Base class of request models. Unsupported fields are refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema

from .errors import FieldError

ModelT = TypeVar("ModelT", bound="RequestModel")
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)
LONG_BODY = 64 * 2**10  # bytes; longer bodies are checked before they are parsed
MAX_VALUES = 32_768  # strings, keys, objects, lists, booleans and nulls in a long body
MAX_NUMBERS = 262_144  # numbers in a long body
MAX_DEPTH = 199  # nesting depth, as in pydantic's parser
_NO_BRACKETS = bytes(each for each in range(256) if each not in b"[]{}")
_SHOWN = 60
_MAX_RULES = 4
_MAX_ERRORS = 100
_RULES = {"a integer": "an integer", "a array": "a list", "a dictionary": "an object"}


def _alias(field: str) -> str:
    return field.rstrip("_")


class RequestModel(BaseModel):
    """Base class of request models. A null field counts as absent."""

    fields_of: ClassVar[Mapping[Any, str]] = {}
    allowed: ClassVar[Mapping[Any, tuple[Any, ...]]] = {}
    model_config = ConfigDict(
        strict=True, extra="allow", protected_namespaces=(), defer_build=True, alias_generator=_alias
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    def client_path(self, path: str) -> str:
        return path

    def check_fields(self, where: str = "") -> None:
        """Raise FieldError for the first unsupported field, including nested objects."""
        for name, value in (self.model_extra or {}).items():
            only(where + name, value, ())
        kind = getattr(self, "type", None)
        fields = self.fields_of.get(kind)
        for field in self.model_fields_set:
            short, value = _alias(field), getattr(self, field, None)
            name = where + short
            if fields is not None and value is not None and short not in ("type", *fields.split()):
                raise FieldError(name, f"{name} is not served with type {kind!r}; leave it out")
            if field in self.allowed:
                only(name, value, self.allowed[field])
            _check_within(value, name)


def _fail_fast(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        schema = list(schema.values())
    if isinstance(schema, list | tuple):
        for each in schema:
            _fail_fast(each)


def _check_within(value: object, where: str) -> None:
    if isinstance(value, RequestModel):
        value.check_fields(f"{where}.")
    elif isinstance(value, list):
        if value and isinstance(value[0], int | str):
            return
        for index, item in enumerate(value):
            _check_within(item, f"{where}[{index}]")


def only(name: str, value: object, allowed: Sequence[object], why: str = "") -> None:
    """Raise FieldError unless the value is None or in ``allowed``."""
    if value is None or any(value == each and type(value) is type(each) for each in allowed):
        return
    if not allowed:
        raise FieldError(name, f"{name} is not served here; leave it out{f': {why}' if why else ''}")
    shown = " or ".join(repr(each) for each in allowed)
    raise FieldError(
        name, f"{name} must be {shown} here, got {value!r:.{_SHOWN}}; leave it out{f': {why}' if why else ''}"
    )


def agreed(model: RequestModel, name: str, other: str, where: str = "") -> Any:
    """Return the value of a field with two names. Raises FieldError if the values differ."""
    value, rule = getattr(model, name), getattr(model, other)
    if None not in (value, rule) and value != rule:
        field = where + name
        raise FieldError(
            field, f"{field} must equal {other} ({rule!r:.60}), got {value!r:.60}; give only one of the two"
        )
    return rule if value is None else value


def parse(kind: type[ModelT], body: bytes) -> ModelT:
    """Parse the body. Raises FieldError for the first invalid field."""
    if len(body) > LONG_BODY:
        _check_values(body)
    body = body.removeprefix(b"\xef\xbb\xbf")  # a byte order mark
    try:
        try:
            if len(body) > LONG_BODY:
                return _checked(kind.model_validate(_loaded(body)))
            request = kind.model_validate_json(body)
        except ValidationError as error:
            whole = _ESCAPE.sub(_paired, body)  # JavaScript clients may send half of a surrogate pair
            if error.error_count() > 1 or error.errors()[0]["type"] != "json_invalid" or whole == body:
                raise
            request = kind.model_validate_json(whole)
    except ValidationError as error:
        raise _refusal(error) from None
    return _checked(request)


def _checked(request: ModelT) -> ModelT:
    request.check_fields()
    return request


def _loaded(body: bytes) -> Any:
    outside = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    depths = accumulate(1 if each in b"[{" else -1 for each in outside.translate(None, _NO_BRACKETS))
    try:
        if max(depths, default=0) > MAX_DEPTH:
            raise ValueError(f"objects and lists are nested more than {MAX_DEPTH} deep")
        return json.loads(_ESCAPE.sub(_paired, body))
    except (ValueError, RecursionError) as error:
        raise FieldError("body", f"the body must be JSON: {error!s:.200}; send an object") from None


def _paired(found: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if found.group(1) else found.group()


def _check_values(body: bytes) -> None:
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    count, num_items = plain.count(b'"') // 2, 0
    if count <= MAX_VALUES:
        outside = b"".join(plain.split(b'"')[::2])
        count += sum(outside.count(each) for each in (b"{", b"[", b"e", b"n"))
        num_items = outside.count(b",")
    for number, most, what in (
        (count, MAX_VALUES, "strings, objects and lists"),
        (num_items, MAX_NUMBERS, "numbers"),
    ):
        if number > most:
            raise FieldError(
                "body", f"a body must have at most {most} {what}, got at least {number}; split the request"
            )


def _refusal(error: ValidationError) -> FieldError:
    if error.error_count() > _MAX_ERRORS:
        return FieldError("body", f"the body has {error.error_count()} wrong values; correct them")
    first, *others = error.errors(include_url=False, include_context=False)
    if first["type"] == "json_invalid":
        return FieldError("body", f"the body must be JSON: {first['msg']}; send an object")
    name = _name(first["loc"])
    if not name:
        return FieldError(
            "body", f"the body must be a JSON object, got {first['input']!r:.{_SHOWN}}; send one"
        )
    if first["type"] == "missing":
        return FieldError(name, f"{name} must be given, got nothing; add it")
    top = first["loc"][0]
    rules = dict.fromkeys(_rule(each) for each in (first, *others) if each["loc"][0] == top)
    return FieldError(
        str(top),
        f"{name} must be {' or '.join([*rules][:_MAX_RULES])}, got {first['input']!r:.{_SHOWN}}; correct it",
    )


def _rule(error: Any) -> str:
    rule = str(error["msg"]).removeprefix("Input should be ").replace("valid ", "")
    return _RULES.get(rule, rule)


def _name(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "dict", "list"):
            path += f".{part}" if path else part
        elif not path:
            path = part
    return path
