"""``python -m isthmus_shared.probe URL``: exit 0 if it answers with a 2xx. For a container's health check."""

from __future__ import annotations

import http.client
import sys
from urllib.parse import urlsplit

TIMEOUT_S = 2.0


def main(url: str) -> int:
    """1 when the process answers that it is not well, or does not answer in time; what it says goes to stdout."""
    parts = urlsplit(url)
    assert parts.hostname is not None, "the URL has a host"
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", parts.path or "/")
        response = connection.getresponse()
        body = response.read(4096).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        sys.stdout.write(f"{url}: {error}\n")
        return 1
    finally:
        connection.close()
    sys.stdout.write(f"{response.status} {body}\n")
    return 0 if 200 <= response.status < 300 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
