from __future__ import annotations

import pytest

from isthmus_kvrelay.transports.verbs.binding import Status
from isthmus_kvrelay.transports.verbs.faults import fault_of
from isthmus_shared.errors import PartyLost, Retry, TransferFailed


@pytest.mark.parametrize(
    ("status", "of_path", "kind"),
    [
        (Status.RETRY_EXC_ERR, True, PartyLost),
        (Status.WR_FLUSH_ERR, True, PartyLost),
        (Status.RNR_RETRY_EXC_ERR, True, TransferFailed),
        (Status.REM_ACCESS_ERR, False, TransferFailed),
        (Status.REM_INV_REQ_ERR, False, TransferFailed),
        (Status.LOC_PROT_ERR, False, TransferFailed),
    ],
)
def test_each_status_is_a_typed_error_that_names_device_and_status(
    status: Status, of_path: bool, kind: type[Exception]
) -> None:
    fault = fault_of("mlx5_0", status)
    error = fault.to_error()
    assert fault.of_path is of_path
    assert fault.cause == status.name.lower()
    assert type(error) is kind
    assert "mlx5_0" in error.text
    assert status.name in error.text
    assert error.retry is Retry.ELSEWHERE
