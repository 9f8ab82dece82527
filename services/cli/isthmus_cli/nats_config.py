"""`isthmus nats-config`: a bus server's configuration, with a user for each role and its permissions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from isthmus_cli.exits import EPILOG, Exit
from isthmus_cli.failing import fail
from isthmus_shared.bus.permissions import Role
from isthmus_shared.bus.server_config import ServerTls
from isthmus_shared.bus.user_files import CONFIG, NKEY, URL, Wanted, users_of, write
from isthmus_shared.errors import ConfigInvalid, IsthmusError


def command(
    folder: Annotated[Path, typer.Argument(help="Where to write server/nats.conf, and <user>/nats_url for each.")],
    worker: Annotated[list[str] | None, typer.Option(help="Id of a worker; again for more.")] = None,
    relay: Annotated[list[str] | None, typer.Option(help="Node of a relay; again for more.")] = None,
    ingress: Annotated[list[str] | None, typer.Option(help="Id of an ingress; again for more.")] = None,
    client: Annotated[list[str] | None, typer.Option(help="Name of a program that asks over the bus.")] = None,
    host: Annotated[str, typer.Option(help="Where processes reach the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port.", min=1, max=65535)] = 4222,
    nkeys: Annotated[bool, typer.Option("--nkeys", help="Users sign instead of sending a password.")] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate of the server: TLS only.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="PEM authority whose certificate a process must show.")] = None,
    jetstream_dir: Annotated[
        Path | None, typer.Option(help="Folder of the server for the planner's lease, for several planners.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="What was written, as JSON.")] = False,
) -> None:
    """Write the configuration of a NATS server in which each process may say and hear only what its role needs.

    Without a name, a role has one user for all of its processes. Passwords that are there already are kept.
    """
    named = {Role.WORKER: worker, Role.RELAY: relay, Role.INGRESS: ingress, Role.CLIENT: client}
    try:
        if (tls_cert is None) != (tls_key is None) or (tls_ca is not None and tls_cert is None):
            raise ConfigInvalid("--tls-cert and --tls-key go together, and --tls-ca with them")
        tls = None if tls_cert is None or tls_key is None else ServerTls(tls_cert, tls_key, tls_ca)
        users = users_of({role: names or [] for role, names in named.items()})
        made = write(folder, Wanted(users, host, port, nkeys, tls, jetstream_dir))
    except IsthmusError as error:
        fail(error, Exit.INVALID)
    told = [_shown(path, nkeys) for path in made]
    if as_json:
        print(json.dumps({"config": str(folder / CONFIG), "users": told}, indent=1))
        return
    print(f"start the server with: nats-server --config {folder / CONFIG}")
    for user in told:
        seed = f" ISTHMUS_NATS_NKEY_FILE={user['nkey_file']}" if nkeys else ""
        print(f"{user['user']}: ISTHMUS_NATS_URL_FILE={user['url_file']}{seed}")


def _shown(user: Path, nkeys: bool) -> dict[str, str | None]:
    return {"user": user.name, "url_file": str(user / URL), "nkey_file": str(user / NKEY) if nkeys else None}


def add_to(app: typer.Typer) -> None:
    app.command("nats-config", epilog=EPILOG)(command)
