"""`isthmus bench load`: how a server holds up under load, whatever server it is that speaks OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import typer

from isthmus_cli.exits import Exit
from isthmus_cli.failing import fail
from isthmus_cli.files import write
from isthmus_cli.load import plan, plot
from isthmus_cli.load.connection import clock_s
from isthmus_cli.load.plan import Arrival, Asking, Shape
from isthmus_cli.load.report import Report, Targets
from isthmus_cli.load.runner import Load
from isthmus_cli.load.target import Target, parse_target
from isthmus_cli.progress import working
from isthmus_shared.errors import ConfigInvalid, IsthmusError, Unavailable

API_KEY = "OPENAI_API_KEY"
PROBE_WORDS = 64
"""Of the request before a trace, from which the server's tokens for a word are learned."""


Arrivals = Literal["poisson", "constant"]
TraceFormat = Literal["mooncake", "azure"]


@dataclass(frozen=True, slots=True)
class Run:
    target: Target
    asking: Asking
    shape: Shape
    targets: Targets
    seconds: float
    warmup_s: float
    timeout_s: float
    seed: int
    clients: int | None = None
    rate: float | None = None
    arrivals: Arrivals = "poisson"
    trace: Path | None = None
    trace_format: TraceFormat = "mooncake"
    speed: float = 1.0

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.clients, self.rate, self.trace)) != 1:
            raise ConfigInvalid(
                "what kind of load?", why="exactly one of --clients, --rate and --trace is needed", todo="give one"
            )

    @property
    def kind(self) -> str:
        if self.trace is not None:
            return f"trace {self.trace.name}, {self.speed:g} times as fast"
        if self.rate is not None:
            return f"{self.rate:g} requests/s, {self.arrivals}"
        return f"{self.clients} clients"


_Url = Annotated[str, typer.Argument(help="The server's base URL, such as http://127.0.0.1:8000/v1.")]
_Model = Annotated[str | None, typer.Option(help="What is asked for; left out: the server's only one.")]
_Clients = Annotated[int | None, typer.Option(min=1, help="Closed loop: so many that ask anew at once.")]
_Rate = Annotated[float | None, typer.Option(min=0.001, help="Open loop: requests per second.")]
_Arrivals = Annotated[Arrivals, typer.Option(help="How an open loop's requests come.")]
_Trace = Annotated[Path | None, typer.Option(help="Open loop: a trace's times and lengths.")]
_TraceFormat = Annotated[TraceFormat, typer.Option(help="Of --trace.")]
_Speed = Annotated[float, typer.Option(min=0.001, help="Replay --trace so many times as fast.")]
_Seconds = Annotated[float, typer.Option(min=0.1, help="Measured, after the warm-up.")]
_WarmupS = Annotated[float, typer.Option("--warmup", min=0.0, help="Seconds of load before, not counted.")]
_Words = Annotated[int, typer.Option(min=1, help="Words in a prompt; a word is a token or two.")]
_OutputTokens = Annotated[int, typer.Option(min=1, help="Of an answer.")]
_Completions = Annotated[bool, typer.Option("--completions", help="Ask /completions instead of a chat.")]
_NoStream = Annotated[bool, typer.Option("--no-stream", help="Whole answers: there is no TTFT then.")]
_KeepEos = Annotated[
    bool, typer.Option("--keep-eos", help="Send no ignore_eos, which servers other than vLLM's kin may refuse.")
]
_TtftMs = Annotated[float | None, typer.Option(min=0.001, help="Goodput: longest time to a first token.")]
_ItlMs = Annotated[float | None, typer.Option(min=0.001, help="Goodput: longest mean wait for a token.")]
_LeastGoodput = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="Exit with 1 when a smaller share is within the targets.")
]
_TimeoutS = Annotated[float, typer.Option("--timeout", min=0.1, help="Longest wait for one answer.")]
_Seed = Annotated[int, typer.Option(help="Of prompts and arrivals.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Every figure, as JSON, on stdout.")]
_Out = Annotated[Path | None, typer.Option(help="Write every figure there (JSON).")]
_PlotFile = Annotated[Path | None, typer.Option("--plot", help="Draw them there (.png, .svg).")]


def load(
    url: _Url,
    model: _Model = None,
    clients: _Clients = None,
    rate: _Rate = None,
    arrivals: _Arrivals = "poisson",
    trace: _Trace = None,
    trace_format: _TraceFormat = "mooncake",
    speed: _Speed = 1.0,
    seconds: _Seconds = 30.0,
    warmup_s: _WarmupS = 3.0,
    words: _Words = 64,
    output_tokens: _OutputTokens = 64,
    completions: _Completions = False,
    no_stream: _NoStream = False,
    keep_eos: _KeepEos = False,
    ttft_ms: _TtftMs = None,
    itl_ms: _ItlMs = None,
    least_goodput: _LeastGoodput = None,
    timeout_s: _TimeoutS = 120.0,
    seed: _Seed = 0,
    as_json: _AsJson = False,
    out: _Out = None,
    plot_file: _PlotFile = None,
) -> None:
    """Send load to a server and measure TTFT, inter-token latency, throughput, goodput and errors.

    Give one of --clients (closed loop), --rate or --trace (open loop). A key is taken from OPENAI_API_KEY.
    """
    try:
        run = Run(
            target=parse_target(url, api_key=os.environ.get(API_KEY) or None),
            asking=Asking(model, chat=not completions, stream=not no_stream, ignore_eos=not keep_eos),
            shape=Shape(words, output_tokens),
            targets=Targets(_seconds(ttft_ms), _seconds(itl_ms)),
            seconds=seconds,
            warmup_s=warmup_s,
            timeout_s=timeout_s,
            seed=seed,
            clients=clients,
            rate=rate,
            arrivals=arrivals,
            trace=trace,
            trace_format=trace_format,
            speed=speed,
        )
        _check_places(trace, out, plot_file)
        with working(f"load on {run.target.host}:{run.target.port}: {run.kind}"):
            report = _run(run)
        figures = json.dumps(report.as_json(url=url, load=run.kind), indent=1)
        print(figures if as_json else report.as_text())
        if out is not None:
            write(out, figures + "\n")
        if plot_file is not None:
            plot.draw(report, plot_file, f"{url}, {run.kind}")
    except ConfigInvalid as error:
        fail(error, Exit.INVALID)
    except IsthmusError as error:
        fail(error, Exit.FAILED)
    _judge(report, least_goodput)


def _check_places(trace: Path | None, *written: Path | None) -> None:
    """Before the load, which may take long."""
    if trace is not None and not trace.exists():
        raise ConfigInvalid(f"{trace} cannot be read", why="there is no such file")
    for path in written:
        if path is not None and not path.parent.is_dir():
            raise ConfigInvalid(f"{path} cannot be written", why=f"there is no folder {path.parent}")


def _judge(report: Report, least_goodput: float | None) -> None:
    if not report.requests or report.errors:
        raise typer.Exit(Exit.FAILED)
    if least_goodput is not None and report.good / report.requests < least_goodput:
        raise typer.Exit(Exit.FAILED)


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3


def _run(run: Run) -> Report:
    try:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_measure(run))
    except ImportError:
        return asyncio.run(_measure(run))


async def _measure(run: Run) -> Report:
    report = Report(run.targets, float("inf"))
    invalid: BaseExceptionGroup[ConfigInvalid] | None = None
    load = Load(run.target, run.asking, report.take, timeout_s=run.timeout_s, seed=run.seed)
    first = await load.once(run.shape if run.trace is None else Shape(PROBE_WORDS, 1))
    if first.error is not None:
        raise Unavailable(
            f"the first request to {run.target.host}:{run.target.port} failed",
            why=first.error,
            todo="check the URL, --model and OPENAI_API_KEY; try --keep-eos for servers that refuse ignore_eos",
        )
    seconds = run.warmup_s + run.seconds
    report.from_s = clock_s() + run.warmup_s
    report.until_s = report.from_s + run.seconds
    if run.clients is not None:
        await load.closed_loop(run.clients, seconds, run.shape)
    else:
        tokens_per_word = max(first.prompt_tokens, PROBE_WORDS) / PROBE_WORDS
        report.until_s = float("inf")  # of an open loop, what came late counts most
        try:
            await load.open_loop(_arrivals(run, seconds, tokens_per_word))
        except* ConfigInvalid as group:  # of a trace, which is read while it is replayed
            invalid = group
    if invalid is not None:
        raise _leaf(invalid)
    return report


def _leaf(group: BaseExceptionGroup[ConfigInvalid]) -> ConfigInvalid:
    first = group.exceptions[0]
    return _leaf(first) if isinstance(first, BaseExceptionGroup) else first


def _arrivals(run: Run, seconds: float, tokens_per_word: float) -> Iterator[Arrival]:
    if run.trace is not None:
        requests = _trace(run.trace, run.trace_format)
        return plan.replayed(requests, speed=run.speed, seconds=seconds, tokens_per_word=tokens_per_word)
    assert run.rate is not None
    if run.arrivals == "poisson":
        return plan.poisson(run.rate, seconds, run.shape, Random(run.seed))
    return plan.constant(run.rate, seconds, run.shape)


def _trace(path: Path, kind: TraceFormat) -> Iterator[tuple[float, int, int]]:
    from isthmus_planner.sim.hardware import ScenarioError
    from isthmus_planner.sim.traces import read_azure, read_mooncake

    reader: Any = read_azure if kind == "azure" else read_mooncake
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            for batch in reader(lines):
                yield from zip(batch.at_s.tolist(), batch.isl_tokens.tolist(), batch.osl_tokens.tolist(), strict=True)
    except OSError as error:
        raise ConfigInvalid(f"{path} cannot be read", why=error.strerror or str(error)) from error
    except (UnicodeDecodeError, ScenarioError) as error:
        raise ConfigInvalid(f"{path} is no {kind} trace", why=str(error)) from error
