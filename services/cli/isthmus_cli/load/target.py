"""Where the load goes: a server's base URL, taken apart once."""

from __future__ import annotations

import ssl
import urllib.parse
from dataclasses import dataclass

from isthmus_shared.errors import ConfigInvalid


@dataclass(frozen=True, slots=True)
class Target:
    host: str
    port: int
    path: str
    """Before `/chat/completions`; begins with a slash or is empty."""
    encrypted: ssl.SSLContext | None
    api_key: str | None = None

    def request(self, path: str, body: bytes) -> bytes:
        """One POST's bytes, on a connection that stays."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        key = f"authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"POST {self.path}{path} HTTP/1.1\r\nhost: {host}:{self.port}\r\naccept: */*\r\n"
            f"content-type: application/json\r\n{key}content-length: {len(body)}\r\n\r\n"
        )
        return head.encode("latin-1") + body


def parse_target(url: str, *, api_key: str | None = None) -> Target:
    """Of `http://host:port`, with or without `/v1` or any other path. Raises `ConfigInvalid`."""
    todo = "give the base URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1"
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigInvalid(f"{url!r} is no URL", why=str(error), todo=todo, param="URL") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigInvalid(f"{url!r} is no URL of a server", todo=todo, param="URL")
    if api_key is not None and (not api_key.isascii() or not api_key.isprintable()):
        raise ConfigInvalid("the API key holds what no header can", todo="check where it comes from", param="API key")
    secure = parts.scheme == "https"
    path = parts.path.rstrip("/") or "/v1"
    return Target(
        parts.hostname,
        port or (443 if secure else 80),
        path,
        ssl.create_default_context() if secure else None,
        api_key,
    )
