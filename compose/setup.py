"""Runs once before everything else: makes the secrets and the demo's model, where they are not there yet.

python setup.py SECRETS_DIR MODEL_DIR NATS_HOST
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

NATS_CONF = """\
port: 4222
monitor_port: 8222
max_payload: 1MB
jetstream {{ store_dir: "/dev/shm/nats", max_memory_store: 16MB, max_file_store: 16MB }}
authorization {{ user: isthmus, password: "{password}" }}
"""


def main(secrets_dir: Path, model_dir: Path, nats_host: str) -> None:
    password = secrets.token_urlsafe(32)
    if not (secrets_dir / "nats.conf").exists():
        # The URL first: with nats.conf there, both are.
        write(secrets_dir / "nats_url", f"nats://isthmus:{password}@{nats_host}:4222")
        write(secrets_dir / "nats.conf", NATS_CONF.format(password=password))
    if not (secrets_dir / "relay_secret").exists():
        write(secrets_dir / "relay_secret", secrets.token_hex(32))
    if not (model_dir / "config.json").exists():
        make_model(model_dir)


def write(path: Path, text: str) -> None:
    """Whole or not at all, and for its owner only."""
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "w") as file:
        file.write(text)
    part.rename(path)


def make_model(folder: Path) -> None:
    """The demo's model, `config.json` last: with it there, all is."""
    from isthmus_shared import demo_model

    if any(folder.iterdir()):
        sys.exit(f"{folder} has files but no config.json; set MODEL_DIR to a Hugging Face model folder")
    demo_model.copy_to(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
