"""How large a prompt's KV is on the wire, from the form that heartbeats tell (`kv.negotiate.kv_form`)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from isthmus_shared.kv.manifest import GroupKind, KvDtype

_GROUP = re.compile(
    r"(?P<kind>full|sliding|latent)(?:w(?P<window>\d+))?\[(?P<layers>\d+(?:,\d+)*)\]"
    r"h(?P<heads>\d+)(?:@\d+/\d+)?d(?P<dim>\d+)(?::(?P<dtype>\w+?))?(?:s.*)?"
)
_FP8 = "fp8"


@dataclass(frozen=True, slots=True)
class KvSize:
    bytes_per_token: float
    """Of layers that keep every token."""
    window_bytes: float = 0.0
    """Of sliding-window layers, once a prompt fills their windows."""

    def of(self, tokens: int) -> float:
        return self.bytes_per_token * tokens + self.window_bytes


def kv_size(form: str) -> KvSize | None:
    """None: the form is not one that this release writes, so nothing is known of its size."""
    dtype, _, rest = form.partition("/")
    _, _, groups = rest.partition("/")
    per_token = window = 0.0
    for text in groups.split(";"):
        found = _GROUP.fullmatch(text)
        itemsize = None if found is None else _itemsize_bytes(found["dtype"] or dtype)
        if found is None or itemsize is None:
            return None
        parts = 1 if found["kind"] == GroupKind.LATENT else 2
        token = len(found["layers"].split(",")) * parts * int(found["heads"]) * int(found["dim"]) * itemsize
        if found["window"] is None:
            per_token += token
        else:
            window += token * int(found["window"])
    return KvSize(per_token, window)


def _itemsize_bytes(dtype: str) -> int | None:
    if dtype.startswith(_FP8):
        return 1
    return KvDtype(dtype).itemsize_bytes if dtype in KvDtype.__members__.values() else None
