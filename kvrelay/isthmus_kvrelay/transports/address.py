"""Where a relay may be dialed."""

from __future__ import annotations

import re

from isthmus_shared.errors import ProtocolViolation

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|(?:[A-Za-z0-9_-]{1,63}\.){0,9}[A-Za-z0-9_-]{1,63}):([0-9]{1,5})")
"""What a ticket may make this relay dial: host name, IPv4, or IPv6 in brackets, and a port."""


def parse_address(text: str) -> tuple[str, int]:
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found[2]) > 65_535:
        raise ProtocolViolation(f"{text[:100]!r} is no relay's address")
    return found[1].strip("[]"), int(found[2])
