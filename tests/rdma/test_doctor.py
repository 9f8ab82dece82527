"""What `isthmus doctor` learns of a real device."""

from __future__ import annotations

from typing import Any

from isthmus_kvrelay.transports.verbs.binding import Depths
from isthmus_kvrelay.transports.verbs.doctor import Grade, HostFacts, check_device
from isthmus_testing.rdma import require_devices

require_devices()

HOST = HostFacts(memlock_bytes=1 << 30, rdma_core=44)


def test_a_sound_device_has_nothing_to_mend(fabric: Any) -> None:
    findings = check_device(fabric.load(), fabric.one, pool_bytes=1 << 20, host=HOST)
    assert {finding.check for finding in findings} == {"rdma-core", "memlock", "port", "mtu", "gid", "depth"}
    assert [finding for finding in findings if finding.grade is not Grade.OK] == []
    assert any("10.77.0.1, RoCE v2" in finding.what for finding in findings)


def test_a_device_that_is_not_there_is_an_error_that_names_the_command(fabric: Any) -> None:
    (device, *_) = check_device(fabric.load(), "nonesuch", pool_bytes=1 << 20, host=HOST)
    assert (device.check, device.grade, device.mend) == ("device", Grade.ERROR, "rdma link")


def test_more_work_requests_than_the_device_grants_are_found(fabric: Any) -> None:
    findings = check_device(
        fabric.load(), fabric.one, pool_bytes=1 << 20, host=HOST, depths=Depths(send=2_000_000, receive=64)
    )
    assert [finding.check for finding in findings if finding.grade is Grade.ERROR] == ["depth"]
