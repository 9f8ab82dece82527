from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field, SecretStr

from isthmus_shared.config import ServiceConfig, Setting, secret_field, settings_of
from isthmus_shared.errors import ConfigInvalid


class Size(StrEnum):
    SMALL = "small"
    LARGE = "large"


class EngineConfig(ServiceConfig):
    PREFIX: ClassVar[str] = "ENGINE"

    size: Size = Field(default=Size.SMALL, description="How much")
    stop_ids: tuple[int, ...] = Field(default=(), description="Where to stop")


class WorkerConfig(EngineConfig):
    PREFIX: ClassVar[str] = "WORKER"

    node: str = Field(description="Its node", min_length=1)
    blocks: int = Field(default=64, ge=1, le=4096, description="KV blocks")
    token: str | None = secret_field(description="A token", min_length=8)
    key: SecretStr | None = Field(default=None, description="A key")
    heartbeat_interval_s: float = Field(default=0.25, gt=0, le=60, description="Faster than others")


def refusal(environ: dict[str, str]) -> ConfigInvalid:
    with pytest.raises(ConfigInvalid) as caught:
        WorkerConfig.load(environ)
    return caught.value


def test_each_field_is_read_under_the_prefix_of_the_class_that_declares_it() -> None:
    config = WorkerConfig.load(
        {
            "ISTHMUS_WORKER_NODE": "n1",
            "ISTHMUS_WORKER_BLOCKS": "128",
            "ISTHMUS_ENGINE_SIZE": "large",
            "ISTHMUS_ENGINE_STOP_IDS": "1, 2,3",
            "ISTHMUS_LOG_LEVEL": "debug",
            "ISTHMUS_HEARTBEAT_INTERVAL_S": "0.5",
            "PATH": "/bin",
        }
    )
    assert (config.node, config.blocks, config.size, config.stop_ids) == ("n1", 128, Size.LARGE, (1, 2, 3))
    assert (config.log_level, config.heartbeat_interval_s) == ("debug", 0.5)


def test_what_is_not_set_or_empty_takes_its_default() -> None:
    config = WorkerConfig.load({"ISTHMUS_WORKER_NODE": "n1", "ISTHMUS_WORKER_BLOCKS": "", "ISTHMUS_HTTP_PORT": ""})
    assert (config.blocks, config.http_port, config.http_host, config.token) == (64, 0, "127.0.0.1", None)
    assert config.heartbeat_interval_s == 0.25


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, "nats://127.0.0.1:4222"),
        ({"NATS_URL": "nats://a:1"}, "nats://a:1"),
        ({"NATS_URL": "nats://a:1", "ISTHMUS_NATS_URL": "nats://b:2"}, "nats://b:2"),
        ({"NATS_URL": "nats://a:1", "ISTHMUS_NATS_URL": ""}, "nats://a:1"),
    ],
)
def test_the_bus_is_found_under_its_standard_name_too(environ: dict[str, str], url: str) -> None:
    assert ServiceConfig.load(environ).nats_url == url


def test_other_services_variables_are_ignored_and_unknown_ones_are_not() -> None:
    others = {
        f"ISTHMUS_{prefix}_ANYTHING": "x" for prefix in ("INGRESS", "PLANNER", "RELAY", "PREFILL", "DECODE", "UP")
    }
    WorkerConfig.load({"ISTHMUS_WORKER_NODE": "n1", **others})
    for name in ("ISTHMUS_WORKER_ANYTHING", "ISTHMUS_ENGINE_ANYTHING", "ISTHMUS_ANYTHING", "ISTHMUS_"):
        error = refusal({"ISTHMUS_WORKER_NODE": "n1", name: "x"})
        assert name in error.text
        assert "not a setting of this process" in error.text


def test_a_misspelt_variable_is_answered_with_the_nearest() -> None:
    error = refusal({"ISTHMUS_WORKER_NODE": "n1", "ISTHMUS_WORKER_BLOKCS": "12"})
    assert "did you mean ISTHMUS_WORKER_BLOCKS?" in error.text
    assert error.param == "ISTHMUS_WORKER_BLOKCS"


def test_all_that_is_wrong_is_told_at_once_with_value_and_what_is_allowed() -> None:
    error = refusal(
        {
            "ISTHMUS_WORKER_BLOCKS": "many",
            "ISTHMUS_ENGINE_SIZE": "huge",
            "ISTHMUS_HTTP_PORT": "70000",
            "ISTHMUS_NODE": "n1",
            "NATS_URL": "http://wrong",
        }
    )
    assert error.what == "6 settings are invalid"
    for part in (
        "ISTHMUS_WORKER_BLOCKS='many'",
        "integer, ≥ 1, ≤ 4096",
        "ISTHMUS_ENGINE_SIZE='huge'",
        "small | large",
        "ISTHMUS_HTTP_PORT='70000'",
        "≤ 65535",
        "ISTHMUS_WORKER_NODE is not set",
        "ISTHMUS_NODE",
        "NATS_URL=",
    ):
        assert part in error.text, part


@pytest.mark.parametrize("name", ["TOKEN", "KEY"])
def test_a_secret_shows_nowhere(name: str) -> None:
    config = WorkerConfig.load({"ISTHMUS_WORKER_NODE": "n1", f"ISTHMUS_WORKER_{name}": "hunter2-hunter2"})
    for text in (repr(config), str(config), str(config.masked())):
        assert "hunter2" not in text
        assert "n1" in text


def test_a_secret_shows_in_no_error_either() -> None:
    assert "hunter2" not in refusal({"ISTHMUS_WORKER_NODE": "n1", "ISTHMUS_WORKER_TOKEN": "hunter2"}).text
    assert "hunter2" not in refusal({"ISTHMUS_WORKER_NODE": "n1", "ISTHMUS_WORKER_TOKN": "hunter2"}).text
    assert "hunter2" not in refusal({"NATS_URL": "http://me:hunter2@host"}).text
    assert "hunter2" not in repr(ServiceConfig.load({"NATS_URL": "nats://me:hunter2@host:1"}))


def test_the_documentation_lists_each_variable_with_default_meaning_and_allowed_values() -> None:
    settings = {setting.variable: setting for setting in settings_of(WorkerConfig, own_only=True)}
    assert settings["ISTHMUS_WORKER_BLOCKS"] == Setting(
        "ISTHMUS_WORKER_BLOCKS", "64", "KV blocks", "integer, ≥ 1, ≤ 4096"
    )
    assert settings["ISTHMUS_WORKER_NODE"].default == "(required)"
    assert settings["ISTHMUS_ENGINE_SIZE"].allowed == "small | large"
    assert settings["ISTHMUS_ENGINE_STOP_IDS"].allowed == "comma-separated integer"
    assert "ISTHMUS_LOG_LEVEL" not in settings
    assert "ISTHMUS_LOG_LEVEL" in {setting.variable for setting in settings_of(WorkerConfig)}


def test_a_setting_may_lie_in_a_file_that_the_environment_names(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("  a long secret\n")
    config = WorkerConfig.load(
        {
            "ISTHMUS_WORKER_NODE": "n1",
            "ISTHMUS_WORKER_TOKEN_FILE": str(token),
            "ISTHMUS_WORKER_BLOCKS_FILE": "",
            "ISTHMUS_RELAY_SECRET_FILE": "/of/another/service",
        }
    )
    assert (config.token, config.blocks) == ("a long secret", 64)


def test_the_bus_url_may_lie_in_a_file_under_either_name(tmp_path: Path) -> None:
    url = tmp_path / "url"
    url.write_text("nats://a:1\n")
    for name in ("NATS_URL_FILE", "ISTHMUS_NATS_URL_FILE"):
        assert ServiceConfig.load({name: str(url)}).nats_url == "nats://a:1"


def test_a_file_that_cannot_be_read_is_named_and_its_content_is_not_shown(tmp_path: Path) -> None:
    large, binary, short = tmp_path / "large", tmp_path / "binary", tmp_path / "short"
    large.write_bytes(b"x" * (64 * 1024 + 1))
    binary.write_bytes(b"\xff\xfe")
    short.write_text("tiny")
    for path, why in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "Is a directory"),
        (large, "larger than 65536 bytes"),
        (binary, "decode"),
    ):
        error = refusal({"ISTHMUS_WORKER_NODE": "n1", "ISTHMUS_WORKER_TOKEN_FILE": str(path)})
        assert error.param == "ISTHMUS_WORKER_TOKEN_FILE"
        assert str(path) in error.text
        assert why in error.text
    error = refusal({"ISTHMUS_WORKER_NODE": "n1", "ISTHMUS_WORKER_TOKEN_FILE": str(short)})
    assert "tiny" not in error.text


def test_a_setting_and_its_file_together_are_refused() -> None:
    error = refusal({"ISTHMUS_WORKER_NODE": "n1", "ISTHMUS_WORKER_NODE_FILE": "/etc/node"})
    assert "both set" in error.text
