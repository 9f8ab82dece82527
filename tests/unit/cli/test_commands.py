from __future__ import annotations

import stat
from pathlib import Path

import pytest

from isthmus_cli.bus_users import write_urls
from isthmus_cli.child import Command
from isthmus_cli.commands import Surroundings, commands
from isthmus_cli.dialling import login_for
from isthmus_cli.spec import ClusterSpec, load
from isthmus_ingress.config import IngressConfig
from isthmus_planner.config import PlannerConfig
from isthmus_shared.bus.login import BusLogin
from isthmus_shared.config import ServiceConfig
from isthmus_shared.engines.config import EngineKind
from isthmus_shared.engines.vllm.arguments import parse
from isthmus_shared.errors import ConfigInvalid
from isthmus_worker.config import WorkerConfig

SECRETS = Path("/run/x/secrets")
EXAMPLES = Path(__file__).parents[3] / "examples"


def plan(
    spec: ClusterSpec, environ: dict[str, str] | None = None, *, secrets: Path = SECRETS, own_bus: bool = True
) -> dict[str, Command]:
    around = Surroundings(
        environ=environ or {},
        model=Path("/models/tiny"),
        logs=Path("/logs"),
        run_dir=Path("/run/x"),
        secrets=secrets,
        port=8123,
        cpus=4,
        own_bus=own_bus,
    )
    return {command.name: command for command in commands(spec, around)}


def test_everything_of_the_demo_is_started_in_an_order_in_which_it_can_be_used() -> None:
    assert list(plan(load(None))) == ["planner", "relay-node-a", "relay-node-b", "prefill-a", "decode-b", "ingress"]


def test_every_process_accepts_the_settings_that_it_is_given(tmp_path: Path) -> None:
    made = plan(load(None), secrets=tmp_path)
    write_urls(tmp_path, {name: f"nats://{name}:pass@127.0.0.1:1" for name in made})
    (tmp_path / "relay_secret").write_text("0123456789abcdef")
    for name, command in made.items():
        assert ServiceConfig.load(command.env).nats_url == f"nats://{name}:pass@127.0.0.1:1"
        assert stat.S_IMODE((tmp_path / f"{name}.nats_url").stat().st_mode) == 0o600
    worker = WorkerConfig.load(made["prefill-a"].env)
    assert (worker.id, worker.node_id, worker.vendor, worker.kv_layout, worker.threads) == (
        "prefill-a",
        "node-a",
        "nvidia",
        "nhd:16:fp32",
        2,
    )
    assert str(worker.relay_socket) == made["relay-node-a"].env["ISTHMUS_RELAY_SOCKET"]
    assert PlannerConfig.load(made["planner"].env).mode == "disaggregated"
    ingress = IngressConfig.load(made["ingress"].env)
    assert (ingress.port, ingress.model_name) == (8123, "isthmus-demo")


def test_workers_of_one_node_share_its_relay_and_those_of_two_do_not() -> None:
    def sockets(spec: ClusterSpec) -> set[str]:
        made = plan(spec)
        return {made[name].env["ISTHMUS_WORKER_RELAY_SOCKET"] for name in ("prefill-a", "decode-b")}

    assert len(sockets(load(None))) == 2
    assert len(sockets(load(None).on_one_node())) == 1


def test_a_node_without_a_relay_has_none_started_and_its_workers_know() -> None:
    spec = load(None)
    bare = spec.model_copy(update={"nodes": tuple(node.model_copy(update={"relay": None}) for node in spec.nodes)})
    made = plan(bare)
    assert not any(name.startswith("relay-") for name in made)
    assert "ISTHMUS_WORKER_RELAY_SOCKET" not in made["decode-b"].env


def test_the_callers_environment_is_passed_on_but_not_its_isthmus_settings() -> None:
    made = plan(
        load(None),
        {"PATH": "/bin", "NATS_URL": "nats://other", "ISTHMUS_WORKER_ID": "x", "ISTHMUS_LOG_LEVEL": "debug"},
    )
    env = made["planner"].env
    assert (env["PATH"], env["ISTHMUS_LOG_LEVEL"]) == ("/bin", "debug")
    assert env["ISTHMUS_NATS_URL_FILE"] == "/run/x/secrets/planner.nats_url"
    assert "NATS_URL" not in env
    assert "ISTHMUS_WORKER_ID" not in env


def test_settings_of_the_callers_own_bus_are_passed_on_and_those_of_ours_are_not() -> None:
    environ = {"ISTHMUS_NATS_CA": "/ca.pem", "ISTHMUS_NATS_NKEY_FILE": "/seed", "ISTHMUS_NATS_URL": "nats://x:1"}
    for own_bus in (True, False):
        for command in plan(load(None), environ, own_bus=own_bus).values():
            assert ("ISTHMUS_NATS_CA" in command.env) is not own_bus
            assert ("ISTHMUS_NATS_NKEY_FILE" in command.env) is not own_bus
            assert "ISTHMUS_NATS_URL" not in command.env


def test_a_local_clusters_own_password_needs_nothing_beside_it() -> None:
    environ = {"ISTHMUS_NATS_CA": "ca.pem", "ISTHMUS_NATS_CERT": "c.pem", "ISTHMUS_NATS_KEY": "k.pem", "PATH": "/bin"}
    assert login_for("nats://operator:secret@127.0.0.1:4222", environ) == BusLogin()
    assert login_for("tls://bus:4222", environ) == BusLogin(ca=Path("ca.pem"), cert=Path("c.pem"), key=Path("k.pem"))
    assert login_for("tls://me:secret@bus:4222", {}) == BusLogin()


def test_only_relays_know_the_secret() -> None:
    made = plan(load(None))
    knowing = {name for name, command in made.items() if "/run/x/secrets/relay_secret" in command.env.values()}
    assert knowing == {"relay-node-a", "relay-node-b"}


def test_a_setting_of_the_file_takes_the_place_of_a_secret_file() -> None:
    spec = load(None).model_copy(update={"env": {"ISTHMUS_NATS_URL": "nats://elsewhere:1"}})
    made = plan(spec)
    assert all(command.env["ISTHMUS_NATS_URL"] == "nats://elsewhere:1" for command in made.values())
    assert not any("ISTHMUS_NATS_URL_FILE" in command.env for command in made.values())


@pytest.mark.parametrize("level", ["process", "cluster"])
def test_the_files_own_settings_win(level: str) -> None:
    spec = load(None)
    if level == "cluster":
        spec = spec.model_copy(update={"env": {"ISTHMUS_LOG_LEVEL": "error"}})
    else:
        spec = spec.model_copy(
            update={"planner": spec.planner.model_copy(update={"env": {"ISTHMUS_LOG_LEVEL": "error"}})}
        )
    assert plan(spec, {"ISTHMUS_LOG_LEVEL": "debug"})["planner"].env["ISTHMUS_LOG_LEVEL"] == "error"


def test_the_example_runs_vllm_on_one_node_and_the_reference_engine_on_the_other(tmp_path: Path) -> None:
    made = plan(load(EXAMPLES / "vllm-cluster.yaml"), secrets=tmp_path)
    write_urls(tmp_path, dict.fromkeys(made, "nats://127.0.0.1:1"))
    prefill, decode = (WorkerConfig.load(made[name].env).engine_config() for name in ("prefill-a", "decode-b"))
    assert (prefill.kind, decode.kind) == (EngineKind.VLLM, EngineKind.REFERENCE)
    assert parse(prefill.vllm_args)["kv_cache_memory_bytes"] == 64 << 20
    assert "max_batch" not in prefill.model_fields_set  # vLLM's own default holds


@pytest.mark.parametrize(("text", "why"), [("x", "names no model"), ("x=", "no folder for 'x'")])
def test_wrong_models_are_refused_with_the_name_of_the_variable(text: str, why: str) -> None:
    with pytest.raises(ConfigInvalid) as ingress:
        IngressConfig.load({"ISTHMUS_INGRESS_MODEL": "/m", "ISTHMUS_INGRESS_MODELS": text})
    with pytest.raises(ConfigInvalid) as worker:
        WorkerConfig.load({"ISTHMUS_WORKER_ID": "w", "ISTHMUS_ENGINE_MODEL": "/m", "ISTHMUS_WORKER_MODELS": text})
    for name, caught in ("ISTHMUS_INGRESS_MODELS", ingress), ("ISTHMUS_WORKER_MODELS", worker):
        assert name in caught.value.text
        assert why in caught.value.text
        assert "Value error" not in caught.value.text
