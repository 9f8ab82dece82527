from __future__ import annotations

import pytest

from isthmus_kvrelay.core.credit import CreditAccount


def test_what_was_granted_is_in_flight_consumed_or_returned() -> None:
    account = CreditAccount()
    for size in (10, 10, 7):
        account.grant(size)
    account.consume(10)
    account.take_back(7)
    assert (account.in_flight_slots, account.in_flight_bytes) == (1, 10)
    account.check_invariants(landing_slots=1, landing_bytes=10)
    with pytest.raises(AssertionError):
        account.check_invariants(landing_slots=0, landing_bytes=0)
