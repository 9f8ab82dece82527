"""Hostile bytes and hostile words for a relay, for as long as asked.

    python -m isthmus_testing.relay_fuzz --seconds 600

Targets: a client's connection and a lane's control stream (frames good, bent and random, into one real core, with
chunks that land early and late), chunk headers against a landing table, a data stream's trains against the receiving
thread's code (Python's and the compiled), and a consumer's bell with what its relay says.

Whatever comes, the guilty side is closed with a typed error or nothing happens; any other exception, an invariant that
breaks, or memory that grows without bound is a finding. Inputs are mutations of well-formed ones, from a seed that a
finding prints.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgpack
import xxhash

from isthmus_kvrelay import control, hot, wire
from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.events import ClientId, ExpectChunk, LaneId, SlotUse
from isthmus_kvrelay.core.relay import RelayCore
from isthmus_kvrelay.core.settings import RelaySettings
from isthmus_kvrelay.daemon.session import event_from_client
from isthmus_kvrelay.framing import FrameReader, prefixed
from isthmus_kvrelay.lane_codec import event_of
from isthmus_kvrelay.transports.landing import LandingTable
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_shared.errors import ProtocolViolation
from isthmus_shared.ids import Incarnation
from isthmus_testing.relay_fuzz_streams import compiled, rings, trains
from isthmus_testing.relay_world import flow

ME, PEER = wire.incarnation_digest(Incarnation("me")), wire.incarnation_digest(Incarnation("peer"))
CLIENT, LANE = ClientId(1), LaneId(1)
SLOT_BYTES, SLOTS = 4096, 16
MAX_GROWTH_BYTES = 32 << 20
"""Of one round's objects: twice the largest frames that a side may send."""
KEYS = [flow(name, generation) for name in "ab" for generation in (1, 2)]
WORDS: list[Any] = [
    None,
    True,
    0,
    1,
    -1,
    2,
    2**31,
    2**32,
    2**63,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "a",
    "é" * 300,
    b"",
    b"\0" * 16,
    [],
    {},
]

Payload = dict[str, Any]


def some_size(random: Random) -> int:
    """Often one that the other side names too."""
    return random.choice([SLOT_BYTES, 3 * SLOT_BYTES, 3 * SLOT_BYTES, random.randrange(5 * SLOT_BYTES)])


def client_words(random: Random) -> Payload:
    key = random.choice(KEYS)
    names = {"transfer_id": key.transfer_id, "generation": key.generation}
    cancelled = {"code": "cancelled", "what": "x"}
    size, seconds = some_size(random), random.choice([1.0, 60.0])
    return random.choice(
        [
            names | {"kind": "open_sink", "total_bytes": size, "manifest": "m", "deadline_s": seconds, "wait_s": 1.0},
            names | {"kind": "seal"},
            names | {"kind": "sink_quiet"},
            names | {"kind": "release", "consumed": random.random() < 0.5},
            names | {"kind": "abort", "fault": cancelled},
            {"kind": "step", "step_s": 0.02, "kv_blocks_free": random.randrange(9), "kv_block_tokens": 16},
            {"kind": "itl", "itl_s": 0.03, "target_s": 0.02},
            {"kind": "bye"},
        ]
    )


def lane_words(random: Random) -> Payload:
    key = random.choice(KEYS)
    names = {"transfer_id": key.transfer_id, "generation": key.generation, "pull": random.randint(1, 3)}
    grants = b"".join(
        random.randrange(5).to_bytes(4, "big") + bytes(3) + b"\1" + bytes(7) + b"\1" for _ in range(random.randrange(4))
    )
    fault = {"code": random.choice(["party_lost", "cancelled", "nonsense"]), "what": "x"}
    cut = random.choice([SLOT_BYTES, SLOT_BYTES, SLOT_BYTES // 2])
    opened = {"total_bytes": some_size(random), "chunk_bytes": cut, "manifest": "m"}
    return random.choice(
        [
            names | {"kind": "pull"},
            names | {"kind": "declined"},
            names | {"kind": "opened"} | opened,
            names | {"kind": "credit", "packed": grants},
            names | {"kind": "done"},
            names | {"kind": "abort", "fault": fault},
            names | {"kind": "revoke", "fault": fault},
            names | {"kind": "quiet"},
            {"kind": "feedback", "itl_s": 0.03, "target_s": 0.02},
            {"kind": "ping"},
            {"kind": "pong"},
        ]
    )


def client_frame(random: Random) -> bytes:
    """One of those that are packed by hand."""
    key = random.choice(KEYS)
    if random.random() < 0.5:
        indices = tuple(random.randrange(4) for _ in range(random.randrange(4)))
        return hot.FilledNotice(*key, control.pack_indices(indices)).packed()
    size, seconds, pull = some_size(random), random.choice([1.0, 60.0, 0.0, float("nan")]), 1
    peer = "127.0.0.1:1", size, "m", seconds, random.choice([pull, 2, 3]), random.randrange(100)
    return hot.OpenSourceRequest(*key, Incarnation(random.choice(["peer", "me"])), *peer).packed()


def lane_frame(random: Random) -> bytes:
    """One of those that are packed by hand."""
    grants = tuple(
        ev.Grant(random.randrange(5), SlotUse(random.randrange(SLOTS), 1)) for _ in range(random.randrange(4))
    )
    sizes = some_size(random), random.choice([SLOT_BYTES, SLOT_BYTES, 1, 0])
    return hot.EagerPull(random.choice(KEYS), random.randint(1, 3), ev.Offer(*sizes, "m", grants)).packed()


def bent(random: Random, words: Payload, frame: bytes) -> bytes:
    """Mostly well-formed; else with a field wrong, missing or too many, or with bytes flipped, cut or doubled."""
    if random.random() < 0.3 and words:
        words = dict(words)
        name = random.choice(list(words))
        match random.randrange(3):
            case 0:
                words[name] = random.choice(WORDS)
            case 1:
                del words[name]
            case _:
                words[random.choice(["x", "pull", "kind", "fault"])] = random.choice(WORDS)
    data = bytearray(frame if random.random() < 0.3 else msgpack.packb(words))
    if random.random() < 0.2:
        for _ in range(random.randint(1, 4)):
            data[random.randrange(len(data))] = random.randrange(256)
    if random.random() < 0.05:
        data = data[: random.randrange(len(data) + 1)] * random.randint(1, 3)
    return bytes(data)


def new_core() -> RelayCore:
    settings = RelaySettings(incarnation=Incarnation("me"), slot_bytes=SLOT_BYTES, total_slots=SLOTS, out_share=0.5)
    core = RelayCore(settings)
    core.handle(ev.ClientUp(CLIENT), now_s=0.0)
    core.handle(ev.LaneUp(LANE, Incarnation("peer")), now_s=0.0)
    return core


def closes(effects: list[ev.Effect]) -> bool:
    return any(isinstance(effect, ev.CloseClient | ev.CloseLane) for effect in effects)


def both_sides(random: Random) -> None:
    """A client and a peer that say anything to one core, in turn, until one of them is closed."""
    core, now_s = new_core(), 0.0
    frames = FrameReader(limit=control.MAX_CLIENT_FRAME_BYTES)
    stream = wire.ControlReader(sender=PEER, receiver=ME)
    armed: list[ExpectChunk] = []
    for _ in range(40):
        now_s += random.choice([0.0, 0.01, 2.0])
        if armed and random.random() < 0.3:
            what = armed.pop(random.randrange(len(armed)))
            landed = ev.ChunkLanded(LANE, what.key, what.chunk, what.into, intact=random.random() < 0.9)
            core.handle(landed, now_s=now_s)
        try:
            if random.random() < 0.5:
                data = prefixed(bent(random, client_words(random), client_frame(random)))
                said = [
                    event_from_client(CLIENT, control.decode_from_client(p)) for p in frames.feed(spoilt(random, data))
                ]
            else:
                payload = bent(random, lane_words(random), lane_frame(random))
                header = wire.Header(wire.FrameType.CONTROL, len(payload), PEER, ME, xxhash.xxh3_64_intdigest(payload))
                data = header.encode() + payload
                said = [event_of(LANE, message) for message in stream.feed(spoilt(random, data))]
        except ProtocolViolation:
            return  # the connection is closed with it
        for event in said:
            effects = [] if event is None else core.handle(event, now_s=now_s)
            armed += [effect for effect in effects if isinstance(effect, ExpectChunk)]
            if closes(effects):
                return
            core.check_invariants()


def spoilt(random: Random, data: bytes) -> bytes:
    """The stream's own framing, now and then broken."""
    if random.random() > 0.05:
        return data
    broken = bytearray(data)
    broken[random.randrange(min(len(broken), 24))] ^= 1 << random.randrange(8)
    return bytes(broken)


def headers(random: Random) -> None:
    """Chunk headers, right and wrong, against a landing table: only the armed chunk ever gets a place."""
    pool = SharedPool.create(pool_bytes=SLOTS * SLOT_BYTES, slot_bytes=SLOT_BYTES)
    try:
        table, key = LandingTable(pool), KEYS[0]
        armed = ExpectChunk(LANE, key, 1, SLOT_BYTES, 100, SlotUse(3, 7))
        table.arm(armed)
        good = wire.Header(
            wire.FrameType.CHUNK, 100, PEER, ME, 5, 1, SlotUse(3, 7), SLOT_BYTES, wire.flow_digest(key), key.generation
        ).encode()
        for _ in range(20):
            data = bytearray(good)
            for _ in range(random.randrange(3)):
                data[random.randrange(len(data))] = random.randrange(256)
            if random.random() < 0.05:
                data = bytearray(random.randbytes(random.choice([0, wire.HEADER_BYTES, 200])))
            try:
                header = wire.Header.decode(data, limit=SLOT_BYTES)
            except ProtocolViolation:
                continue
            claim = table.begin(header, random.choice([LANE, LaneId(2)]))
            if claim is not None:
                said = (header.flow, header.chunk, header.into, header.offset_bytes, header.payload_bytes)
                assert said == (wire.flow_digest(key), 1, SlotUse(3, 7), SLOT_BYTES, 100)
                assert table.finish(claim[0])
                claim[1].release()
                table.arm(armed)
    finally:
        pool.close()


TARGETS: tuple[Callable[[Random], None], ...] = (both_sides, both_sides, headers, trains, trains, rings)


def fuzz(seconds: float, *, seed: int, most: int | None = None) -> int:
    """Rounds done. Raises what a round found, naming its seed."""
    compiled()  # its memory is no round's
    end_s, rounds = time.monotonic() + seconds, 0
    tracemalloc.start()
    try:
        while time.monotonic() < end_s and (most is None or rounds < most):
            random = Random(seed + rounds)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                random.choice(TARGETS)(random)
            except Exception as error:
                raise AssertionError(f"round {seed + rounds}: {type(error).__name__}: {error}") from error
            grown = tracemalloc.get_traced_memory()[1] - before
            assert grown < MAX_GROWTH_BYTES, f"round {seed + rounds}: {grown} bytes"
            rounds += 1
    finally:
        tracemalloc.stop()
    return rounds


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fuzz a relay's control messages and wire headers.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None, help="default: from the clock; a finding names its round")
    args = parser.parse_args(argv)
    seed = time.time_ns() % 2**40 if args.seed is None else args.seed
    rounds = fuzz(args.seconds, seed=seed)
    sys.stdout.write(f"seed={seed} rounds={rounds} seconds={args.seconds:g} findings=0\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
