"""The two linked RDMA devices that tests/rdma needs, or a loud skip."""

from __future__ import annotations

import os

import pytest

from isthmus_kvrelay.transports.verbs.binding import load_binding
from isthmus_shared.errors import ConfigInvalid

DEVICES = "ISTHMUS_TEST_RDMA_DEVICES"
"""Two names, separated by a comma; `make rdma-test` sets it in its guest. There a missing device is no skip."""
HOW = "`make rdma-test` brings two Soft-RoCE devices in a User-Mode-Linux guest"


def linked_devices(binding: str) -> tuple[str, str]:
    """Names of two devices that reach each other, to be used through that binding."""
    named = os.environ.get(DEVICES)
    try:
        found = load_binding((binding,)).devices()
    except ConfigInvalid as error:
        if named:
            raise
        pytest.skip(f"no RDMA library {binding}: {error.why}; {HOW}")
    except OSError as error:
        if named:
            raise
        pytest.skip(f"no RDMA in this kernel ({error.strerror}); {HOW}")
    if not named:
        pytest.skip(f"{DEVICES} does not name two linked RDMA devices (there are {found}); {HOW}")
    one, two = named.split(",")
    return one, two
