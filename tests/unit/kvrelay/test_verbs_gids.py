from __future__ import annotations

from ipaddress import IPv6Address
from pathlib import Path

import pytest

from isthmus_kvrelay.transports.verbs.gids import Gid, GidType, rank_gids, read_gids


def gid(index: int, address: str, kind: str = GidType.ROCE_V2) -> Gid:
    return Gid(index, IPv6Address(address), kind)


def test_routable_before_unroutable_and_ipv4_before_global_before_link_local() -> None:
    gids = [
        gid(0, "fe80::1", GidType.ROCE_V1),
        gid(1, "fe80::1"),
        gid(2, "::ffff:10.0.0.1", GidType.ROCE_V1),
        gid(3, "2001:db8::1"),
        gid(5, "::ffff:10.0.0.1"),
        gid(4, "::ffff:10.1.0.1"),
    ]
    assert [one.index for one in rank_gids(gids)] == [4, 5, 3, 1, 2, 0]


def test_an_address_without_an_interface_part_is_left_out() -> None:
    assert rank_gids([gid(0, "::"), gid(1, "fe80::")]) == []


def test_an_ipv4_address_is_shown_as_one() -> None:
    assert gid(0, "::ffff:10.77.0.1").text == "10.77.0.1"
    assert gid(0, "fe80::1").text == "fe80::1"


def test_the_kernels_files_are_read_and_unused_entries_left_out(tmp_path: Path) -> None:
    port = tmp_path / "dev0" / "ports" / "1"
    for index, (address, kind) in enumerate([("fe80::1", "IB/RoCE v1"), ("::", None), ("::ffff:a4d:1", "RoCE v2")]):
        for folder, text in (("gids", address), ("gid_attrs/types", kind), ("gid_attrs/ndevs", kind and "eth0")):
            (port / folder).mkdir(parents=True, exist_ok=True)
            if text is not None:
                (port / folder / str(index)).write_text(f"{text}\n")
    found = read_gids("dev0", sysfs=tmp_path)
    assert [(one.index, one.type, one.interface) for one in found] == [
        (0, "IB/RoCE v1", "eth0"),
        (2, "RoCE v2", "eth0"),
    ]
    with pytest.raises(FileNotFoundError):
        read_gids("dev1", sysfs=tmp_path)
