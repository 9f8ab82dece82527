"""Values that fit a JSON schema, as pydantic writes it, or that just do not: seeds for fuzzers."""

from __future__ import annotations

from random import Random
from typing import Any

MAX_DEPTH = 8
WORDS: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64 - 1, -(2**63), 0.5, 1e308),
    *(float("nan"), float("inf"), "", "a", "é" * 300, "\0", "a" * 70_000, b"", b"\xff\x00", [], [[]], {}, {"a": 1}),
)
"""What no field is glad to see."""


def value(random: Random, schema: dict[str, Any], root: dict[str, Any], depth: int = 0) -> Any:
    """One that mostly fits. `root` holds ``$defs``."""
    if depth > MAX_DEPTH or random.random() < 0.01:
        return random.choice(WORDS)
    if "$ref" in schema:
        return value(random, root["$defs"][schema["$ref"].rsplit("/", 1)[-1]], root, depth)
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            return value(random, random.choice(schema[union]), root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return random.choice(schema["enum"])
    match schema.get("type"):
        case "object":
            return _object(random, schema, root, depth)
        case "array":
            return _array(random, schema, root, depth)
        case "string":
            return _string(random, schema)
        case "integer":
            return _number(random, schema, whole=True)
        case "number":
            return _number(random, schema, whole=False)
        case "boolean":
            return random.random() < 0.5
        case "null":
            return None
    return random.choice(WORDS)


def _object(random: Random, schema: dict[str, Any], root: dict[str, Any], depth: int) -> dict[str, Any]:
    required = set(schema.get("required", ()))
    properties = schema.get("properties", {})
    return {
        name: value(random, part, root, depth + 1)
        for name, part in properties.items()
        if (name in required or random.random() < 0.6) and random.random() < 0.98
    }


def _array(random: Random, schema: dict[str, Any], root: dict[str, Any], depth: int) -> list[Any]:
    if "prefixItems" in schema:
        return [value(random, part, root, depth + 1) for part in schema["prefixItems"]]
    least = schema.get("minItems", 0)
    count = max(least, random.choice((0, 1, 2, 3)))
    return [value(random, schema.get("items", {}), root, depth + 1) for _ in range(count)]


def _string(random: Random, schema: dict[str, Any]) -> str | bytes:
    least, most = schema.get("minLength", 0), schema.get("maxLength", 64)
    size = random.choice((least, min(most, max(least, 8)), min(most, 300)))
    if schema.get("format") == "binary":
        return random.randbytes(size)
    return "".join(random.choice("abcXYZ019-_. é\u20ac") for _ in range(size)) if random.random() < 0.3 else "a" * size


def _number(random: Random, schema: dict[str, Any], *, whole: bool) -> int | float:
    low = schema.get("minimum", schema.get("exclusiveMinimum", -3))
    high = schema.get("maximum", schema.get("exclusiveMaximum", low + 1000))
    found = random.choice((low, high, low + 1, (low + high) / 2))
    return min(max(int(found), -(2**63)), 2**64 - 1) if whole else float(found)


def bent(random: Random, tree: Any) -> Any:
    """The same with one part replaced, doubled, removed or nested, somewhere."""
    if isinstance(tree, dict) and tree and random.random() < 0.9:
        name = random.choice(list(tree))
        match random.randrange(6):
            case 0:
                return {key: item for key, item in tree.items() if key != name}
            case 1:
                return {**tree, random.choice(("x", "", "kind", "v", "__proto__", "é" * 40)): random.choice(WORDS)}
            case 2:
                return {**tree, name: random.choice(WORDS)}
        return {**tree, name: bent(random, tree[name])}
    if isinstance(tree, list) and tree and random.random() < 0.9:
        place = random.randrange(len(tree))
        if random.random() < 0.2:
            return tree * random.choice((2, 50))
        return [*tree[:place], bent(random, tree[place]), *tree[place + 1 :]]
    return random.choice((*WORDS, [tree], {"a": tree}))


def mangled(random: Random, data: bytes) -> bytes:
    """With bytes flipped, cut, doubled or put in."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        if not found:
            break
        place = random.randrange(len(found))
        match random.randrange(5):
            case 0:
                found[place] ^= 1 << random.randrange(8)
            case 1:
                del found[place:]
            case 2:
                del found[place : place + random.randrange(1, 9)]
            case 3:
                found[place:place] = found[place : place + random.randrange(1, 64)]
            case 4:
                found[place:place] = random.randbytes(random.randrange(1, 5))
    return bytes(found)
