"""Writes `docs/cli.md` from the isthmus command itself, its exit codes and what its --json prints.

python tools/gen_cli_docs.py          write
python tools/gen_cli_docs.py --check  exit 1 if what is there differs
"""

from __future__ import annotations

import argparse
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("shared", "kvrelay", "services/worker", "services/planner", "services/cli")
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]

import typer  # noqa: E402
from typer.models import ArgumentInfo, ParameterInfo, ParamMeta  # noqa: E402
from typer.utils import get_params_from_function  # noqa: E402

from isthmus_cli.exits import Exit  # noqa: E402
from isthmus_cli.main import app  # noqa: E402
from isthmus_cli.shapes import SHAPES, Shape  # noqa: E402

INTRO = """\
# The isthmus command

In a clone `make` targets of the same names run it (`make status ARGS=--watch`), and it lies at `.venv/bin/isthmus`.
`isthmus COMMAND --help` says the same as this page, which is generated from the code by `make schemas`.

Results go to stdout. Errors go to stderr in one line, `isthmus: what happened: why; what to do`; then there is no
result. What takes longer shows its progress on a terminal, and nothing of it in a file or a pipe.

**Completion** of commands, options and their values: `isthmus --install-completion` for the shell that it is typed in
(bash, zsh, fish, PowerShell), `isthmus --show-completion` to look at it first. It takes effect in the next shell.

## Exit codes
"""


def commands(of: typer.Typer, prefix: str = "") -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every command by its full name."""
    for each in of.registered_commands:
        assert each.callback is not None
        name = each.name or each.callback.__name__.replace("_", "-")
        yield f"{prefix}{name}", each.callback
    for group in of.registered_groups:
        assert group.typer_instance is not None
        yield from commands(group.typer_instance, f"{prefix}{group.name} ")


def section(name: str, callback: Callable[..., Any]) -> str:
    params = list(get_params_from_function(callback).values())
    arguments = [param for param in params if isinstance(param.default, ArgumentInfo)]
    usage = " ".join(
        ["isthmus", name, "[OPTIONS]"] + [_usage(param, callback) for param in arguments],
    )
    parts = [f"## {name}", f"```\n{usage}\n```", inspect.cleandoc(callback.__doc__ or "")]
    rows = [_row(param, callback) for param in params]
    parts.append(_table(("", "default", "meaning"), rows))
    parts += [_shape(key, shape) for key, shape in SHAPES.items() if key == name or key.startswith(f"{name} --")]
    return "\n\n".join(parts)


def _usage(param: ParamMeta, callback: Callable[..., Any]) -> str:
    name = param.name.upper()
    return name if _default(param, callback) is inspect.Parameter.empty else f"[{name}]"


def _default(param: ParamMeta, callback: Callable[..., Any]) -> Any:
    return inspect.signature(callback).parameters[param.name].default


def _row(param: ParamMeta, callback: Callable[..., Any]) -> tuple[str, str, str]:
    info: ParameterInfo = param.default
    kind = _values(param.annotation)
    if isinstance(info, ArgumentInfo):
        name = f"`{param.name.upper()}`"
    else:
        spelled = next(iter(info.param_decls or ()), f"--{param.name.replace('_', '-')}")
        name = f"`{spelled}`" if kind == "flag" else f"`{spelled}` {kind}"
    shown = _shown(_default(param, callback))
    bounds = ", ".join(
        f"{word} {bound:g}" for word, bound in (("at least", info.min), ("at most", info.max)) if bound is not None
    )
    meaning = (info.help or "") + (f" ({bounds})" if bounds else "")
    if info.envvar:
        meaning += f" Also `{info.envvar}`."
    return name, shown, meaning


def _shown(default: object) -> str:
    if default is inspect.Parameter.empty:
        return "required"
    if default is None or default is False:
        return ""
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _values(annotation: Any) -> str:
    """What may be given, in a word."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(each for each in get_args(annotation) if each is not type(None))
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{each}`" for each in get_args(annotation))
    words = {bool: "flag", str: "text", int: "number", float: "number", Path: "path", list[str]: "text, again for more"}
    return words[annotation]


def _shape(key: str, shape: Shape) -> str:
    rows = [
        (f"`{name.rstrip('?')}`" + (" (not always)" if name.endswith("?") else ""), meaning)
        for name, meaning in shape.fields.items()
    ]
    return f"`isthmus {key} --json`: {shape.form}.\n\n{_table(('field', ''), rows)}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def page() -> str:
    codes = _table(("code", "meaning"), [(str(code.value), code.meaning) for code in Exit])
    found = dict(commands(app))
    unknown = {key.split(" --")[0] for key in SHAPES} - set(found)
    assert not unknown, f"shapes of commands that do not exist: {unknown}"
    order = sorted(found, key=list(SHAPES).index)
    return "\n\n".join([INTRO + "\n" + codes, *(section(name, found[name]) for name in order)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page differs")
    parser.add_argument("--file", type=Path, default=ROOT / "docs" / "cli.md", help="the page")
    options = parser.parse_args()
    text = page()
    if not options.check:
        options.file.write_text(text)
    elif not options.file.exists() or options.file.read_text() != text:
        print(f"{options.file.name} does not match the isthmus command; run `make schemas` and commit")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
