"""Checking a call's arguments by its tool's JSON Schema, in bounded time and without reading anything else.

Schemas come from strangers (MCP servers), arguments from the model, and the check runs between all conversations. So
references are never retrieved, patterns run in a linear engine, `uniqueItems` is linear, and the rest has a budget.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from verl_mt.bounds import (
    MAX_ARGUMENT_CHARACTERS,
    MAX_ARGUMENT_VALUES,
    MAX_CHECK_STEPS,
    MAX_SCHEMA_CHARACTERS,
    MAX_SCHEMA_VALUES,
    excess,
)
from verl_mt.errors import PluginError, ToolCallError
from verl_mt.plugins import listing, suggest

logger = logging.getLogger(__name__)

_DATA = ("const", "default", "enum", "example", "examples")
"""Keywords whose value is data, not a schema."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords whose value maps names to schemas."""
_REFERENCES = ("$ref", "$dynamicRef")
_LISTED_AT_ONCE = 32
"""Entries of a list in a schema (`enum`, `required`) that count as one step."""


class ArgumentSchema:
    """The `parameters` of one tool.

    Args:
        parameters: a JSON Schema of type object.
        where: the tool, for errors.
        server_checks: the tool's server checks arguments too: a pattern that cannot be checked here is left to it.

    Raises:
        PluginError: no JSON Schema, one of another type or too large, a reference to somewhere else, or a pattern that
            the linear engine does not know.
    """

    def __init__(self, parameters: dict[str, Any], where: str, *, server_checks: bool = False):
        too_much = excess(parameters, max_values=MAX_SCHEMA_VALUES, max_characters=MAX_SCHEMA_CHARACTERS)
        if too_much:
            raise PluginError(f"{where}: parameters are too large: {too_much}. Write a shorter schema")
        kind = validator_for(parameters, default=Draft202012Validator)
        try:
            kind.check_schema(parameters)
        except SchemaError as error:
            path = ".".join(str(p) for p in error.absolute_path) or "parameters"
            raise PluginError(f"{where}: parameters are not a JSON Schema: {path}: {error.message[:200]}") from error
        if parameters.get("type", "object") != "object":
            raise PluginError(f"{where}: parameters must have type 'object', got {parameters['type']!r}")
        _check_required(parameters, where)
        checkable = _mapped(_mapped(parameters, _with_null), lambda s: _with_known_patterns(s, where, server_checks))
        self._validator: Validator = _bounded(kind)(checkable, registry=Registry())
        _check_references(self._validator, where)

    def errors(self, name: str, arguments: dict[str, Any]) -> list[ValidationError]:
        """All mistakes.

        Args:
            name: of the tool, for errors.

        Raises:
            ToolCallError: the arguments are too large, or take too long to check.
        """
        too_much = excess(arguments, max_values=MAX_ARGUMENT_VALUES, max_characters=MAX_ARGUMENT_CHARACTERS)
        if too_much:
            raise ToolCallError(f"arguments of {name} are too large: {too_much}")
        budget = _left.set([MAX_CHECK_STEPS])
        try:
            return list(self._validator.iter_errors(arguments))
        except (_OverBudget, RecursionError) as error:
            raise ToolCallError(f"arguments of {name} have too many parts to check: send fewer values") from error
        finally:
            _left.reset(budget)


class _OverBudget(Exception):
    pass


_left: ContextVar[list[int]] = ContextVar("steps left of one check")

Keyword = Callable[[Any, Any, Any, Any], Iterator[ValidationError] | None]


def _spend(steps: int) -> None:
    left = _left.get()
    left[0] -= steps
    if left[0] < 0:
        raise _OverBudget


def _counted(keyword: Keyword) -> Keyword:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        _spend(1 + (len(value) // _LISTED_AT_ONCE if isinstance(value, list | dict) else 0))
        yield from keyword(validator, value, instance, schema) or ()

    return check


@lru_cache
def _bounded(kind: type[Validator]) -> type[Validator]:
    """The validator of the same draft with a budget, and with replaced keywords where the draft's are not linear."""
    own: dict[str, Keyword] = {
        "uniqueItems": _unique_items,
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
    }
    keywords = {n: _counted(own.get(n, keyword)) for n, keyword in kind.VALIDATORS.items()}
    return extend(kind, keywords)


def _unique_items(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if wanted and isinstance(instance, list) and len(set(map(_hashable, instance))) < len(instance):
        yield ValidationError("the list has an item twice, and its items must be unique")


def _hashable(value: Any) -> Any:
    """Equal where JSON Schema says equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, bool):
        return (value,)
    if isinstance(value, list):
        return ("list", *map(_hashable, value))
    if isinstance(value, dict):
        return frozenset((key, _hashable(item)) for key, item in value.items())
    return value


def _pattern(validator: Any, pattern: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _regex(pattern).search(_encodable(instance)):
        yield ValidationError(f"{instance[:100]!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, dict):
        for pattern, subschema in patterns.items():
            for key in _matching(pattern, instance):
                yield from validator.descend(instance[key], subschema, path=key, schema_path=pattern)


def _additional_properties(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    known = {key for pattern in schema.get("patternProperties", {}) for key in _matching(pattern, instance)}
    known |= schema.get("properties", {}).keys()
    extra = [key for key in instance if key not in known]
    if isinstance(allowed, dict):
        for key in extra:
            yield from validator.descend(instance[key], allowed, path=key)
    elif not allowed and extra:
        verb = "was" if len(extra) == 1 else "were"
        names = ", ".join(map(repr, sorted(extra, key=str)[:10]))
        yield ValidationError(f"Additional properties are not allowed ({names} {verb} unexpected)")


def _matching(pattern: str, instance: dict[str, Any]) -> list[str]:
    _spend(len(instance) // _LISTED_AT_ONCE)
    return [key for key in instance if _regex(pattern).search(_encodable(key))]


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


@lru_cache(maxsize=1024)
def _regex(pattern: str) -> Any:
    """Raises:
    PluginError: the engine is not installed, or does not know the pattern.
    """
    try:
        import re2
    except ImportError as error:
        raise PluginError("patterns in tool schemas need google-re2: pip install google-re2") from error
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error)
        raise PluginError(
            f"pattern {pattern[:200]!r} cannot be checked in linear time ({reason}). "
            "Write it without look-around and back-references, or leave it out"
        ) from error


def _mapped(schema: Any, edit: Callable[[dict[str, Any]], Any], *, is_names: bool = False) -> Any:
    """A copy in which `edit` was applied to every schema, the innermost first.

    Args:
        is_names: `schema` maps names to schemas.
    """
    if isinstance(schema, list):
        return [_mapped(item, edit) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: value if key in _DATA and not is_names else _mapped(value, edit, is_names=key in _NAMED and not is_names)
        for key, value in schema.items()
    }
    return found if is_names else edit(found)


def _with_known_patterns(schema: dict[str, Any], where: str, server_checks: bool) -> dict[str, Any]:
    """Raises:
    PluginError: a pattern that the linear engine does not know, and nobody else checks it.
    """
    keys = {"pattern"} if isinstance(schema.get("pattern"), str) else set()
    for pattern in [*(schema[key] for key in keys), *schema.get("patternProperties", ())]:
        try:
            _regex(pattern)
        except PluginError as error:
            if not server_checks:
                raise PluginError(f"{where}: {error}") from error
            logger.warning("%s: %s. The server checks it", where, error)
            dropped = {"pattern"} if pattern == schema.get("pattern") else {"patternProperties", "additionalProperties"}
            schema = {key: value for key, value in schema.items() if key not in dropped}
    return schema


def _check_references(validator: Any, where: str) -> None:
    """Every reference is to a part of the schema, and none to itself.

    Raises:
        PluginError: one is not.
    """
    found: list[dict[str, Any]] = []
    _mapped(validator.schema, found.append)
    for schema in found:
        for keyword in _REFERENCES:
            if isinstance(schema.get(keyword), str):
                _resolve(validator, schema, keyword, where)
    unevaluated = any(key.startswith("unevaluated") for schema in found for key in schema)
    if unevaluated and any({*_REFERENCES, "patternProperties"} & schema.keys() for schema in found):
        raise PluginError(
            f"{where}: unevaluatedProperties and unevaluatedItems beside $ref or patternProperties cannot be checked "
            "in bounded time. Write additionalProperties or items instead"
        )


def _resolve(validator: Any, schema: dict[str, Any], keyword: str, where: str) -> None:
    seen: list[str] = []
    while isinstance(schema, dict) and isinstance(reference := schema.get(keyword), str):
        if reference in seen:
            raise PluginError(f"{where}: {keyword} {reference[:200]!r} refers to itself. Say what the value is")
        seen.append(reference)
        with contextlib.suppress(Unresolvable):
            schema = validator._resolver.lookup(reference).contents
            continue
        raise PluginError(
            f"{where}: {keyword} {reference[:200]!r} is no part of the schema, and references are never retrieved. "
            "Put what it refers to into $defs"
        )


def _check_required(parameters: dict[str, Any], where: str) -> None:
    properties = parameters.get("properties")
    if properties and not {"patternProperties", "additionalProperties"} & set(parameters):
        for name in parameters.get("required") or []:
            if name not in properties:
                raise PluginError(
                    f"{where}: required names {name!r}, which is not among properties{suggest(name, properties)} "
                    f"({listing(properties)})"
                )


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    """With `nullable: true`, which transformers and OpenAPI write for Optional, in words that JSON Schema knows."""
    known = dict(schema)
    if schema.get("nullable") is not True:
        return known
    if isinstance(kinds := known.get("type"), str | list):
        known["type"] = [*([kinds] if isinstance(kinds, str) else kinds), "null"]
    if isinstance(known.get("enum"), list):
        known["enum"] = [*known["enum"], None]
    return known
