from __future__ import annotations

import pytest

from isthmus_kvrelay.core.credit import CreditAccount, Credits


def test_what_was_granted_is_in_flight_consumed_or_returned() -> None:
    account = CreditAccount()
    for size in (10, 10, 7):
        account.grant(size)
    account.consume(10)
    account.take_back(7)
    assert account.in_flight == 10
    account.check_in_flight(10)
    with pytest.raises(AssertionError):
        account.check_in_flight(0)


def test_a_chunk_is_credit_of_every_kind_but_kv_blocks() -> None:
    credit = Credits()
    credit.grant_chunk(100, host_us=7)
    credit.grant_chunk(50, host_us=7)
    credit.consume_chunk(100, host_us=7)
    assert credit.staging_slots.in_flight == credit.work_requests.in_flight == 1
    assert (credit.staging_bytes.in_flight, credit.host_us.in_flight) == (50, 7)
    credit.take_back_chunk(50, host_us=7)
    assert credit.staging_bytes.returned == 50
    assert credit.kv_blocks.granted == 0
