"""YAML as people write it: what a parser trips over, and what it silently takes wrongly, is told. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

from isthmus_shared.errors import ConfigInvalid


class _Loader(yaml.SafeLoader):
    """Without keys that are given twice: the last one would win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def load_yaml(text: str, where: str) -> Any:
    """The document's value. Raises `ConfigInvalid` naming `where` and the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigInvalid(f"{where} is not YAML", why=" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ConfigInvalid(f"{where} is nested too deeply", todo="write it flat") from error
    except (ValueError, ArithmeticError, AttributeError, LookupError) as error:
        # What a scalar that looks like a date or a number, and is none, ends in.
        raise ConfigInvalid(f"{where} holds a value that YAML cannot read", why=str(error), todo="quote it") from error
