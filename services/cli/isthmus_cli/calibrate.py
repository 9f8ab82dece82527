"""`isthmus calibrate`: the cost model's constants from measurements, and how far they can be trusted."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus_cli.exits import EPILOG, Exit
from isthmus_cli.failing import fail
from isthmus_cli.files import write
from isthmus_cli.progress import working
from isthmus_shared.errors import ConfigInvalid, IsthmusError

if TYPE_CHECKING:
    from isthmus_planner.cost.calibration.session import Session

MAX_FILE_BYTES = 64 * 1024 * 1024
"""A hundred thousand measurements have a quarter of that."""


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(calibrate)


def calibrate(
    measurements: Annotated[Path, typer.Argument(help="CSV with a line per benchmark run (docs/cost-model.md).")],
    out: Annotated[Path | None, typer.Option(help="Write the constants there (YAML).")] = None,
    fit: Annotated[
        str, typer.Option(help="Fit on `all`, `half`, or so many points of each group; `none`: judge only.")
    ] = "all",
    constants: Annotated[
        Path | None, typer.Option(help="Constants known already: the prior, or with --fit none what is judged.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write every error table there (Markdown); slower.")] = None,
    predictions: Annotated[Path | None, typer.Option(help="Write measured and predicted, row by row (CSV).")] = None,
    length_ratio: Annotated[float, typer.Option(help="Real over nominal lengths.")] = 0.9,
    seed: Annotated[int, typer.Option(help="Chooses what is left out.", min=0)] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse to judge beyond what was measured.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The errors, as JSON, on stdout.")] = False,
) -> None:
    """Fit the cost model's constants to measurements, and tell their error on measurements that were left out.

    What is known of other accelerators (built in, or --constants) is the prior, so that few points are enough.
    """
    try:
        with working("fitting, and judging on what was left out"):
            session = _session(
                _read(measurements),
                constants,
                fit=fit,
                length_ratio=length_ratio,
                seed=seed,
                source=_source(measurements),
            )
            if strict:
                session.refuse_extrapolation()
            said = json.dumps(session.facts(), indent=1) + "\n" if as_json else session.summary()
            made = ((out, session.constants_yaml), (report, session.report), (predictions, session.predictions))
            texts = [(path, text()) for path, text in made if path is not None]
        print(said, end="")
        for path, text in texts:
            write(path, text)
            print(f"wrote {path}", file=sys.stderr)
    except IsthmusError as error:
        fail(error, Exit.INVALID)


def _session(text: str, constants: Path | None, *, fit: str, length_ratio: float, seed: int, source: str) -> Session:
    try:
        from isthmus_planner.cost.calibration import codec, packaged, session
    except ImportError as error:
        raise ConfigInvalid(
            f"`isthmus calibrate` needs {error.name}", todo="install it with: pip install 'isthmus[plan]'"
        ) from error
    names = packaged.names()
    known = packaged.constants() if constants is None else codec.load(_read(constants), names, str(constants))
    return session.Session(
        text,
        names,
        known,
        trusted=constants is not None,
        source=source,
        fit=fit,
        length_ratio=length_ratio,
        seed=seed,
    )


def _source(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{path.name}, sha256 {digest[:16]}"


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigInvalid(f"{path} has more than {MAX_FILE_BYTES} bytes", todo="split it")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"cannot read {path}", why=str(error), todo="give a readable text file") from error
