"""The isthmus command."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Annotated

import structlog
import typer
from rich.console import Console

import isthmus_shared
from isthmus_cli import bench, calibrate, doctor, nats_config, plan, reproduce, simulate, watch
from isthmus_cli import explain as explain_view
from isthmus_cli import status as status_view
from isthmus_cli.calling import own_command
from isthmus_cli.chat import Chat, converse, say
from isthmus_cli.cluster import UpOptions
from isthmus_cli.cluster import up as run_cluster
from isthmus_cli.exits import EPILOG, Exit
from isthmus_cli.failing import fail, help_if_alone
from isthmus_cli.progress import working
from isthmus_cli.reporter import JsonReporter, TerminalReporter
from isthmus_cli.spec import ClusterSpec, Engine, Mode, load
from isthmus_cli.state import DEFAULT_STATE_DIR, ClusterState, StateDir
from isthmus_cli.stopping import wait_until_gone
from isthmus_shared.errors import ConfigInvalid, DeadlineExceeded, InvalidRequest, IsthmusError

START_TIMEOUT_S = 180.0
"""A cold machine imports torch several times over before anything is ready."""
DOWN_TIMEOUT_S = 60.0
"""All bounds of an orderly stop together, and some."""
PIPE_COLUMNS = 200
"""Width of tables that go into a file or a pipe, where nothing says how wide it is."""

app = typer.Typer(
    name="isthmus",
    help="One OpenAI-compatible endpoint over accelerators of more than one vendor.",
    epilog=EPILOG,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")
doctor.add_to(app)
calibrate.add_to(app)
plan.add_to(app)
reproduce.add_to(app)
simulate.add_to(app)
nats_config.add_to(app)

StateDirOption = Annotated[
    Path, typer.Option("--state-dir", help="Folder for logs and state.", envvar="ISTHMUS_UP_STATE_DIR")
]


def _version(wanted: bool) -> None:
    if wanted:
        print(isthmus_shared.__version__)
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    _version_wanted: Annotated[
        bool, typer.Option("--version", help="Show the version and end.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    # What the command has to say it prints; of the libraries' log only what is wrong, on stderr.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    help_if_alone(context)


@app.command(epilog=EPILOG)
def up(
    cluster: Annotated[
        Path | None, typer.Argument(help="Cluster file (YAML); without it, the demo of two nodes is started.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the endpoint; 0 takes a free one.", min=0, max=65535)
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address of the endpoint.")] = None,
    engine: Annotated[Engine | None, typer.Option(help="Instead of the file's.")] = None,
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder of a model to serve.")] = None,
    model_name: Annotated[str | None, typer.Option(help="Its name for clients.")] = None,
    same_node: Annotated[
        bool, typer.Option("--same-node", help="All workers on the first node, over one relay.")
    ] = False,
    mode: Annotated[
        Mode | None, typer.Option(help="Who may decode what another prefilled; instead of the file's.")
    ] = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
    start_timeout_s: Annotated[float, typer.Option(help="Longest wait until ready, seconds.", min=1)] = START_TIMEOUT_S,
    json_events: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of text.")] = False,
) -> None:
    """Start a whole cluster on this machine and keep it running until Ctrl-C.

    The bus is a server of its own, or yours if NATS_URL is set.
    """
    reporter = JsonReporter(sys.stdout) if json_events else TerminalReporter(Console())
    try:
        spec = _adjusted(load(cluster), port, host, engine, model, model_name, mode)
        options = UpOptions(
            state_dir=state_dir,
            nats_url=os.environ.get("NATS_URL") or None,
            start_timeout_s=start_timeout_s,
            environ=dict(os.environ),
            command=own_command(sys.argv[0], shutil.which),
        )
        code = asyncio.run(run_cluster(spec.on_one_node() if same_node else spec, options, reporter))
    except IsthmusError as error:
        fail(error, Exit.INVALID if isinstance(error, ConfigInvalid) else Exit.NOT_STARTED)
    raise typer.Exit(code)


@app.command(epilog=EPILOG)
def status(
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
    bus_url: Annotated[str | None, typer.Option(help="Ask the planner on this bus instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON; a line each with --watch.")] = False,
    watched: Annotated[
        bool, typer.Option("--watch", help="Again and again until Ctrl-C, whatever happens to the cluster.")
    ] = False,
    interval_s: Annotated[float, typer.Option(help="With --watch: seconds between two looks.", min=0.1)] = 1.0,
) -> None:
    """Show workers, relays and ingresses: state, roles, layout, load, free KV, staging, credits, latencies."""
    console = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    folder = None if bus_url is not None else StateDir(state_dir)
    try:
        if watched:
            watch.run(watch.Source(folder, bus_url), interval_s, console, as_json=as_json)
            return
        cluster = None if folder is None else folder.read()
        view = asyncio.run(status_view.fetch(bus_url or _cluster_of(cluster).bus_url))
    except KeyboardInterrupt:
        raise typer.Exit(Exit.OK) from None
    except BrokenPipeError:  # the reader has seen enough; nothing more may be written, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(Exit.OK) from None
    except IsthmusError as error:
        fail(error, Exit.NO_CLUSTER)
    if as_json:
        print(json.dumps(status_view.as_fields(cluster, view), indent=1))
    else:
        console.print(*status_view.tables(cluster, view), sep="\n")


@app.command(epilog=EPILOG)
def explain(
    request_id: Annotated[str, typer.Argument(help="As in the answer's x-request-id header, or in the logs.")],
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
    bus_url: Annotated[str | None, typer.Option(help="Ask the planners on this bus instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Tell why a request went where it went: the candidates, their predictions, the choice, and what happened."""
    console = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    try:
        url = bus_url or StateDir(state_dir).read().bus_url
        found = asyncio.run(explain_view.fetch(url, request_id))
    except InvalidRequest as error:
        fail(error, Exit.FAILED)
    except IsthmusError as error:
        fail(error, Exit.NO_CLUSTER)
    if as_json:
        print(json.dumps(explain_view.as_fields(found), indent=1))
    else:
        console.print(*explain_view.shown(found), sep="\n")


@app.command(epilog=EPILOG)
def chat(
    prompt: Annotated[str | None, typer.Argument(help="What to say; without it, a conversation.")] = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
    url: Annotated[str | None, typer.Option(help="Endpoint, e.g. http://127.0.0.1:8000.")] = None,
    model: Annotated[str | None, typer.Option(help="Model; by default the cluster's.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of each answer, at most.", min=1)] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Each answer when it is whole, as a line of JSON.")] = False,
) -> None:
    """Talk to the running cluster. The answer streams; Ctrl-D or Ctrl-C ends a conversation."""
    try:
        cluster = None if url is not None and model is not None else StateDir(state_dir).read()
    except IsthmusError as error:
        fail(error, Exit.NO_CLUSTER)
    base, name = url or _cluster_of(cluster).http_url, model or _cluster_of(cluster).model
    with Chat(base.rstrip("/").removesuffix("/v1"), name, max_tokens=max_tokens, system=system) as talk:
        if prompt is None:
            converse(talk, as_json=as_json)
            return
        try:
            say(talk, prompt, as_json=as_json)
        except IsthmusError as error:
            print(end="" if as_json else "\n")
            fail(error, Exit.FAILED)


@app.command(epilog=EPILOG)
def down(
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="What was stopped, as JSON.")] = False,
) -> None:
    """Stop the running cluster in order, and wait until it is gone."""
    folder = StateDir(state_dir)
    try:
        cluster = folder.read()
    except IsthmusError as error:
        fail(error, Exit.NO_CLUSTER)
    pid = cluster.supervisor_pid
    try:
        with working(f"stopping {len(cluster.processes)} processes"):
            gone = wait_until_gone(pid, signal.SIGTERM, timeout_s=DOWN_TIMEOUT_S)
    except ProcessLookupError:
        gone = True
    if not gone:
        text = f"the supervisor (pid {pid}) did not end within {DOWN_TIMEOUT_S:g} s"
        fail(DeadlineExceeded(text, todo=f"see the logs in {folder.logs}, or kill it"), Exit.FAILED)
    if as_json:
        print(json.dumps({"stopped": True, "supervisor_pid": pid, "logs": str(folder.logs)}, indent=1))
    else:
        print(f"stopped; logs are in {folder.logs}")


def _adjusted(
    spec: ClusterSpec,
    port: int | None,
    host: str | None,
    engine: str | None,
    model: Path | None,
    model_name: str | None,
    mode: str | None,
) -> ClusterSpec:
    """The file with what the command line says over it, validated again."""
    fields = spec.model_dump()
    overrides = {
        ("ingress", "port"): port,
        ("ingress", "host"): host,
        ("model", "path"): model,
        ("model", "name"): model_name,
        ("planner", "mode"): mode,
    }
    for (section, field), value in overrides.items():
        if value is not None:
            fields[section][field] = value
    if engine is not None:
        fields["engine"] = engine
    return ClusterSpec.checked(fields, "command line")


def _cluster_of(cluster: ClusterState | None) -> ClusterState:
    assert cluster is not None, "read unless everything it would tell was given"
    return cluster


def main() -> None:
    """Wrong usage is told in one line, as every other error is."""
    try:
        code = app(prog_name="isthmus", standalone_mode=False)
    except typer.Abort:  # Ctrl-D at a question
        code = Exit.KILLED
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        path = "isthmus" if context is None else context.command_path
        what = error.format_message().rstrip(".").replace("Value error, ", "")  # how pydantic calls what typer found
        print(f"isthmus: {InvalidRequest(what, todo=f'see `{path} --help`').text}", file=sys.stderr)
        code = Exit.INVALID
    sys.exit(code or 0)


if __name__ == "__main__":
    main()
