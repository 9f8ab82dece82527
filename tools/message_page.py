"""docs/messages.md, from the channels and message types; `gen_schemas.py` writes and checks it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from isthmus_shared.messages.base import WireMessage
from isthmus_shared.messages.catalog import CHANNELS, Channel

HEAD = """\
# Messages

What the processes say to each other over NATS. Each message is one msgpack map: the fields below, `kind` (the name that
is its title here) and `v` (its version). A receiver refuses another kind or version, an unknown field, a missing one;
nothing is guessed. Durations travel, never times of day; KV bytes never travel here.

The same is in [schemas/](../schemas), as JSON Schema for each message and as
[AsyncAPI 3.0](../schemas/asyncapi.yaml). This page is generated from the code by `make schemas`.
"""
LIMITS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minItems": "at least {}",
    "maxItems": "at most {}",
    "maxLength": "at most {} characters",
    "pattern": "matching {}",
}


def page(messages: Mapping[str, type[WireMessage]]) -> str:
    parts: dict[str, type[BaseModel]] = {}
    for message in messages.values():
        _collect(message, parts)
    sections = [HEAD, "## Subjects", _table(("subject", "message", "from", "to", "what"), map(_channel, CHANNELS))]
    sections.append("## Messages of the bus")
    sections += [_section(kind, message) for kind, message in messages.items()]
    sections.append("## Parts of messages")
    sections += [_section(name, part) for name, part in sorted(parts.items())]
    return "\n\n".join(section.strip("\n") for section in sections) + "\n"


def _channel(channel: Channel) -> tuple[str, ...]:
    kind = "OpenAI's JSON" if channel.message is None else _link(channel.message.KIND)
    if channel.reply is not None:
        kind += f" → {_link(channel.reply.KIND)}"
    queue = f" (queue group `{channel.queue}`)" if channel.queue else ""
    return (
        f"`{channel.address}`",
        kind,
        ", ".join(channel.publishers),
        ", ".join(channel.listeners),
        channel.text + queue,
    )


def _link(name: str) -> str:
    return f"[`{name}`](#{name.lower()})"


def _section(name: str, model: type[BaseModel]) -> str:
    # No part's own docstring: pydantic passes BaseModel's on.
    text = inspect.cleandoc(model.__doc__) if "__doc__" in vars(model) and model.__doc__ else ""
    schema, texts = model.model_json_schema(mode="validation"), _attribute_texts(model)
    required = set(schema.get("required", ()))
    rows = [
        (
            f"`{field}`",
            _type(of, schema.get("$defs", {})),
            "required" if field in required else _default(of),
            texts.get(field, ""),
        )
        for field, of in schema.get("properties", {}).items()
    ]
    body = _table(("field", "type", "default", "meaning"), rows) if rows else "No fields."
    return "\n\n".join(part for part in (f"### {name}", text, body) if part)


def _collect(model: type[BaseModel], parts: dict[str, type[BaseModel]]) -> None:
    for field in model.model_fields.values():
        for found in _models_in(field.annotation):
            if found.__name__ not in parts:
                parts[found.__name__] = found
                _collect(found, parts)


def _models_in(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _models_in(inner)


def _type(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _type(defs[name], defs) if "enum" in defs[name] else _link(name)
    if "anyOf" in schema:
        return " or ".join(_type(one, defs) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind == "array":
        fixed = schema.get("prefixItems", ())
        kind = (
            "[" + ", ".join(_type(one, defs) for one in fixed) + "]"
            if fixed
            else f"list of {_type(schema['items'], defs)}"
        )
    elif kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        kind = f"map to {_type(schema['additionalProperties'], defs)}"
    limits = ", ".join(text.format(f"{schema[name]}") for name, text in LIMITS.items() if name in schema)
    return f"{kind}, {limits}" if limits else kind


def _default(schema: Mapping[str, Any]) -> str:
    value = schema.get("default")
    return "null" if value is None else f"`{value}`"


def _attribute_texts(model: type[BaseModel]) -> dict[str, str]:
    """Field → the string that stands below it in the source, bases first."""
    texts: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if cls.__module__.startswith("isthmus_"):
            body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
            assert isinstance(body, ast.ClassDef)
            for field, after in zip(body.body, body.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _is_text(after):
                    texts[field.target.id] = " ".join(ast.literal_eval(after.value).split())
    return texts


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )
