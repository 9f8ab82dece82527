from __future__ import annotations

import resource
from ipaddress import IPv6Address

import pytest

from isthmus_kvrelay.transports.verbs.binding import PortFacts
from isthmus_kvrelay.transports.verbs.doctor import Grade, check_gids, check_memlock, check_port, check_rdma_core
from isthmus_kvrelay.transports.verbs.gids import Gid, GidType


@pytest.mark.parametrize(
    ("limit", "grade"), [(resource.RLIM_INFINITY, Grade.OK), (1 << 20, Grade.OK), ((1 << 20) - 1, Grade.ERROR)]
)
def test_the_locked_memory_limit_must_hold_the_pool(limit: int, grade: Grade) -> None:
    finding = check_memlock(limit, pool_bytes=1 << 20)
    assert finding.grade is grade
    assert (grade is Grade.OK) or "ulimit -l unlimited" in finding.mend


@pytest.mark.parametrize(("version", "grade"), [(None, Grade.WARNING), (43, Grade.WARNING), (44, Grade.OK)])
def test_an_old_rdma_core_is_a_warning(version: int | None, grade: Grade) -> None:
    assert check_rdma_core(version).grade is grade


def test_a_port_that_is_down_is_an_error_and_small_packets_are_a_warning() -> None:
    assert [f.grade for f in check_port("d", PortFacts(active=False, mtu=5, lid=0, ethernet=True))] == [Grade.ERROR]
    small = check_port("d", PortFacts(active=True, mtu=2, lid=0, ethernet=True))
    assert [(f.check, f.grade) for f in small] == [("port", Grade.OK), ("mtu", Grade.WARNING)]
    assert "512 bytes" in small[1].what


@pytest.mark.parametrize(
    ("gids", "grade", "says"),
    [
        ([], Grade.ERROR, "no address"),
        ([Gid(0, IPv6Address("::ffff:10.0.0.1"), GidType.ROCE_V1, "eth0")], Grade.WARNING, "no RoCE v2"),
        ([Gid(0, IPv6Address("fe80::1"), GidType.ROCE_V2, "eth0")], Grade.WARNING, "link-local"),
        ([Gid(0, IPv6Address("fe80::2:c903:1"), GidType.ROCE_V1)], Grade.OK, "fe80::2:c903:1"),  # InfiniBand proper
        ([Gid(3, IPv6Address("::ffff:10.0.0.1"), GidType.ROCE_V2, "eth0")], Grade.OK, "10.0.0.1"),
    ],
)
def test_the_address_that_lanes_would_use_is_judged(gids: list[Gid], grade: Grade, says: str) -> None:
    finding = check_gids("mlx5_0", gids)
    assert finding.grade is grade
    assert says in finding.what
    assert (grade is Grade.OK) != bool(finding.mend)
