"""Writes `docs/configuration.md` from the services' configuration models.

python tools/gen_config_docs.py          write
python tools/gen_config_docs.py --check  exit 1 if what is there differs
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    "shared",
    "kvrelay",
    "services/ingress",
    "services/planner",
    "services/worker",
    "services/prefill-worker",
    "services/decode-worker",
)
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]

from isthmus_shared.config import ServiceConfig, Setting, settings_of  # noqa: E402

MODULES = {
    "ingress": "isthmus_ingress.config",
    "planner": "isthmus_planner.config",
    "prefill-worker, decode-worker": "isthmus_worker.config",
    "prefill-worker": "isthmus_prefill.config",
    "decode-worker": "isthmus_decode.config",
    "kvrelay": "isthmus_kvrelay.daemon.config",
}
INTRO = """\
# Configuration

Every process reads its settings once, when it starts, from environment variables. An unknown `ISTHMUS_…` variable or
an invalid value ends it with status 2 and a message that names the variable, the value and what is allowed. An empty
variable counts as unset. Variables of other services are ignored, so one environment may hold all of them. Any of
them may be given as `<NAME>_FILE` instead: the path of a file (at most 64 KiB) that holds the value, as containers'
secrets are.

This page is generated from the code by `make schemas`.
"""


def models(module_name: str) -> list[type[ServiceConfig]]:
    """The module's own configuration models; none if the module does not exist."""
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            return []
        raise
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ServiceConfig) and value.__module__ == module_name
    ]


def table(settings: list[Setting]) -> str:
    rows = ["| variable | default | allowed | meaning |", "| --- | --- | --- | --- |"]
    for setting in settings:
        default = f"`{setting.default}`" if setting.default else ""
        cells = (f"`{setting.variable}`", default, setting.allowed, setting.meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def rendered() -> str:
    sections = [INTRO, "## Every process\n", table(settings_of(ServiceConfig))]
    for title, module_name in MODULES.items():
        settings: dict[str, Setting] = {}
        for model in models(module_name):
            settings |= {setting.variable: setting for setting in settings_of(model, own_only=True)}
        if settings:
            sections += [f"## {title}\n", table(list(settings.values()))]
    return "\n".join(sections)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page differs")
    parser.add_argument("--file", type=Path, default=ROOT / "docs" / "configuration.md")
    options = parser.parse_args()
    text = rendered()
    if options.check:
        same = options.file.exists() and options.file.read_text() == text
        if not same:
            print(f"{options.file.name} does not match the configuration models; run `make schemas` and commit")
        return 0 if same else 1
    options.file.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
