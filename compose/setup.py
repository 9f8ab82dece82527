"""Runs once before everything else: makes the secrets and the demo's model, where they are not there yet.

python setup.py SECRETS_DIR MODEL_DIR NATS_HOST
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

from isthmus_shared.bus.permissions import Role
from isthmus_shared.bus.user_files import Wanted, users_of, write
from isthmus_shared.secret_file import write_secret

PORT, MONITOR = 4222, 8222
LEASES = Path("/dev/shm/nats")
"""The planners' lease; a new one is made when the server's container starts again."""
RELAY_SECRET = Path(Role.RELAY.value, "relay_secret")


def main(secrets_dir: Path, model_dir: Path, nats_host: str) -> None:
    """Each user has a folder of `secrets_dir`, which is a volume of its own: a container sees only its own."""
    wanted = Wanted(users_of({}), nats_host, PORT, nkeys=False, tls=None, jetstream_dir=LEASES, monitor_port=MONITOR)
    write(secrets_dir, wanted)
    if not (secrets_dir / RELAY_SECRET).exists():
        write_secret(secrets_dir / RELAY_SECRET, secrets.token_hex(32))
    if not (model_dir / "config.json").exists():
        make_model(model_dir)


def make_model(folder: Path) -> None:
    """The demo's model, `config.json` last: with it there, all is."""
    from isthmus_shared import demo_model

    if any(folder.iterdir()):
        sys.exit(f"{folder} has files but no config.json; set MODEL_DIR to a Hugging Face model folder")
    demo_model.copy_to(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
