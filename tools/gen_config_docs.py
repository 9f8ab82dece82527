"""Writes `docs/configuration.md` and `compose/.env.example` from the services' configuration models.

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

from isthmus_shared.config import MASK, ServiceConfig, Setting, settings_of  # noqa: E402

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

ENV_INTRO = """\
# Settings of the containers: copy this file to `.env` beside compose.yaml and edit it. A line that stays a comment, or
# whose value is empty, leaves the default. Secrets are made by the `setup` service; they do not belong here.
#
# This file is generated from the code by `make schemas`.

# --- Docker Compose

# Address and port of this machine at which the API is published
#PUBLISH_HOST=127.0.0.1
#PUBLISH_PORT=8000
# A Hugging Face model folder of this machine, readable by user 10001; by default a volume with the demo's model
#MODEL_DIR=model
# Tag of the images that are built and started
#IMAGE_TAG=dev
# The bus server's image
#NATS_IMAGE=nats:2-alpine
# Where pip finds torch's CPU build; empty: in the usual index
#TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
# Limits of one container each
#INGRESS_MEMORY=512m
#PLANNER_MEMORY=512m
#WORKER_MEMORY=2g
#WORKER_CPUS=2.0
#RELAY_MEMORY=768m
#RELAY_CPUS=1.0

# With nvidia.yaml and amd.yaml: vLLM's images, memory of a worker on GPUs, and the host's groups of /dev/kfd, /dev/dri
#NVIDIA_VLLM_IMAGE=vllm/vllm-openai:v0.32.0
#AMD_VLLM_IMAGE=vllm/vllm-openai-rocm:v0.32.0
#GPU_WORKER_MEMORY=64g
#GPU_SHM=16g
#AMD_VIDEO_GROUP=44
#AMD_RENDER_GROUP=110

# With published-bus.yaml: this host's address at which other hosts reach the bus and node a's relay
#BUS_HOST=127.0.0.1

# With node.yaml (docs/two-hosts.md): the node's name, role, vendor's label and KV layout; this host's address; the
# folder of the first host's secrets; ports
#NODE=node-b
#NODE_ROLE=decode
#NODE_VENDOR=cpu
#NODE_KV_LAYOUT=nhd:16:fp32
#NODE_HOST=192.0.2.2
#SECRETS_DIR=./secrets
#NODE_RELAY_PORT=9200
#NODE_RELAY_HTTP_PORT=9101
#NODE_WORKER_HTTP_PORT=9102

# With observability.yaml: images, ports on PUBLISH_HOST, and Grafana's first password for `admin`
#PROMETHEUS_IMAGE=prom/prometheus:v3.5.0
#PROMETHEUS_PORT=9090
#GRAFANA_IMAGE=grafana/grafana:12.1.0
#GRAFANA_PORT=3000
#GRAFANA_PASSWORD=admin
#OTEL_COLLECTOR_IMAGE=otel/opentelemetry-collector:0.131.0
"""
SET_BY_COMPOSE = {
    "ISTHMUS_NATS_URL",
    "ISTHMUS_HTTP_HOST",
    "ISTHMUS_HTTP_PORT",
    "ISTHMUS_INGRESS_HOST",
    "ISTHMUS_INGRESS_PORT",
    "ISTHMUS_INGRESS_MODEL",
    "ISTHMUS_ENGINE_MODEL",
    "ISTHMUS_ENGINE_KV_LAYOUT",
    "ISTHMUS_WORKER_ID",
    "ISTHMUS_WORKER_NODE_ID",
    "ISTHMUS_WORKER_VENDOR",
    "ISTHMUS_WORKER_RELAY_SOCKET",
    "ISTHMUS_RELAY_NODE_ID",
    "ISTHMUS_RELAY_SOCKET",
    "ISTHMUS_RELAY_HOST",
    "ISTHMUS_RELAY_PORT",
    "ISTHMUS_RELAY_ADVERTISE",
    "ISTHMUS_RELAY_SECRET",
}
"""What compose.yaml says itself, since it differs by service or follows from the containers."""


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


def sections() -> list[tuple[str, list[Setting]]]:
    """(who reads it, settings), in the order in which they are shown."""
    found = [("Every process", settings_of(ServiceConfig))]
    for title, module_name in MODULES.items():
        settings: dict[str, Setting] = {}
        for model in models(module_name):
            settings |= {setting.variable: setting for setting in settings_of(model, own_only=True)}
        if settings:
            found.append((title, list(settings.values())))
    return found


def page() -> str:
    return "\n".join([INTRO, *(part for title, own in sections() for part in (f"## {title}\n", table(own)))])


def env_example() -> str:
    """Every setting as a comment, so that a copy of it changes nothing until a line is made one's own."""
    lines = [ENV_INTRO]
    for title, settings in sections():
        lines.append(f"# --- {title}\n")
        for setting in settings:
            if setting.variable in SET_BY_COMPOSE:
                continue
            lines += [f"# {setting.meaning} ({setting.allowed})", f"#{setting.variable}={_shown(setting)}", ""]
    return "\n".join(lines)


def _shown(setting: Setting) -> str:
    return "" if setting.default in ("(required)", MASK) else setting.default


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs")
    parser.add_argument("--file", type=Path, default=ROOT / "docs" / "configuration.md", help="the page")
    parser.add_argument("--env-file", type=Path, default=ROOT / "compose" / ".env.example", help="the example")
    options = parser.parse_args()
    differs = False
    for path, text in ((options.file, page()), (options.env_file, env_example())):
        if not options.check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"{path.name} does not match the configuration models; run `make schemas` and commit")
            differs = True
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
