"""One request through the simulated cluster is one trace, whose spans lie where they belong."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from isthmus_shared.bus.port import BusMessage
from isthmus_shared.messages import subjects
from isthmus_shared.messages.work import SamplingParams
from isthmus_shared.tracing import HEADER, parse_traceparent
from isthmus_shared.tracing_otel import OtelTracing
from isthmus_sim.cluster import Cluster
from isthmus_sim.load import Ask, Outcome, serve
from isthmus_sim.loop import run_world, world_loop
from isthmus_sim.trace import Trace

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ISL_TOKENS, OSL_TOKENS = 600, 12


def traced(ask: Callable[[Cluster], Awaitable[None]]) -> list[ReadableSpan]:
    """The spans of what `ask` does with a simulated cluster."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def main() -> None:
        cluster = Cluster(3, Trace())
        cluster.world.tracing = OtelTracing(provider, lambda: world_loop().world_s)
        await cluster.start()
        await ask(cluster)
        await cluster.check_nothing_is_left()
        await cluster.stop()
        assert cluster.world.problems == []

    run_world(main())
    return list(exporter.get_finished_spans())


async def one(cluster: Cluster, traceparent: str | None, *, leaves_after_s: float | None = None) -> Outcome:
    sampling = SamplingParams(max_tokens=OSL_TOKENS, temperature=0, ignore_eos=True)
    outcome = Outcome(Ask("client", 0.0, tuple(range(100)) * 6, sampling, leaves_after_s))
    frontend = cluster.ingresses[0].frontend
    assert frontend is not None
    await serve(frontend, outcome, traceparent=traceparent)
    return outcome


def seconds(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def test_a_request_is_one_trace_from_the_front_door_over_the_bus_to_the_last_token() -> None:
    async def ask(cluster: Cluster) -> None:
        assert len((await one(cluster, PARENT)).tokens) == OSL_TOKENS

    spans = traced(ask)
    by_id = {span.context.span_id: span for span in spans if span.context is not None}
    parents = {
        span.name: (by_id[span.parent.span_id].name if span.parent.span_id in by_id else "the client's")
        for span in spans
        if span.parent is not None
    }
    assert parents == {
        "request": "the client's",
        "attempt": "request",
        "route": "attempt",
        "route_request": "route",
        "submit_prefill": "attempt",
        "queue": "attempt",
        "prefill": "attempt",
        "stage": "prefill",
        "submit_decode": "attempt",
        "transfer": "attempt",
        "start_decode": "attempt",
        "commit": "attempt",
        "decode": "attempt",
    }
    assert len(spans) == len(parents), "one span of each"
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context is not None} == {PARENT.split("-")[1]}
    for span in spans:
        parent = None if span.parent is None else by_id.get(span.parent.span_id)
        if parent is not None:
            (start, end), (outer_start, outer_end) = seconds(span), seconds(parent)
            assert outer_start <= start <= end <= outer_end, f"{span.name} is not within {parent.name}"
    named = {span.name: span for span in spans}
    order = ["route", "queue", "prefill", "commit", "decode"]
    for before, after in pairwise(order):
        assert seconds(named[before])[1] <= seconds(named[after])[0], f"{before} is over when {after} begins"
    chunks = [event.attributes["tokens"] for event in named["prefill"].events if event.attributes is not None]
    assert len(chunks) > 1
    assert sum(int(str(tokens)) for tokens in chunks) == ISL_TOKENS
    assert [event.name for event in named["request"].events] == ["first_token"]
    assert named["decode"].attributes is not None
    assert named["decode"].attributes["tokens"] == OSL_TOKENS - 1, "the first came from prefill"
    assert all(span.status.is_ok or not span.status.description for span in spans)


@pytest.mark.parametrize("given", [None, "", "rubbish", PARENT.upper(), PARENT + "-x", "00-" + "0" * 32 + PARENT[35:]])
def test_a_bad_traceparent_is_ignored_and_the_request_has_a_trace_of_its_own(given: str | None) -> None:
    assert given is None or parse_traceparent(given) is None

    async def ask(cluster: Cluster) -> None:
        assert len((await one(cluster, given)).tokens) == OSL_TOKENS

    spans = traced(ask)
    roots = [span for span in spans if span.parent is None]
    assert [span.name for span in roots] == ["request"]
    assert {span.context.trace_id for span in spans if span.context is not None} == {
        root.context.trace_id for root in roots if root.context is not None
    }


def test_a_request_that_its_client_leaves_has_failed_spans_and_all_are_ended() -> None:
    async def ask(cluster: Cluster) -> None:
        await one(cluster, PARENT, leaves_after_s=0.02)

    spans = {span.name: span for span in traced(ask)}
    assert spans["request"].status.description == "client_gone"
    assert spans["attempt"].status.description == "cancelled"


def test_a_parent_that_is_not_sampled_leaves_nothing() -> None:
    async def ask(cluster: Cluster) -> None:
        await one(cluster, PARENT[:-1] + "0")

    assert traced(ask) == []


def test_without_tracing_no_header_is_sent_and_opentelemetry_is_not_imported() -> None:
    sent: list[BusMessage] = []

    async def main() -> None:
        cluster = Cluster(3, Trace())

        async def listen() -> None:
            async with cluster.world.broker.client("listener").subscribe(">") as messages:
                async for message in messages:
                    sent.append(message)

        listening = asyncio.create_task(listen())
        await cluster.start()
        assert len((await one(cluster, PARENT)).tokens) == OSL_TOKENS
        listening.cancel()
        await cluster.stop()

    run_world(main())
    assert subjects.ROUTE in {message.subject for message in sent}
    assert not [message for message in sent if HEADER in message.headers]
    program = "import isthmus_ingress.service, isthmus_worker.host, sys; print('opentelemetry' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"
