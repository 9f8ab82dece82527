"""One ingress, several models: real workers and a planner, each model with a tokenizer of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from isthmus_ingress.config import IngressConfig
from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.messages import subjects
from isthmus_shared.messages.assign import AssignRoles
from isthmus_shared.messages.health import ProcessState, Role
from isthmus_shared.messages.work import Ack
from isthmus_testing import eventually
from isthmus_testing.ingress import running_ingress, write_text_folder
from isthmus_testing.worker_stack import cluster

FIRST, OTHER = "isthmus-demo", "other"


def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The other model's folder holds no chat template, so that one can tell whose text is used."""
    first, other = write_text_folder(tmp_path / FIRST), write_text_folder(tmp_path / OTHER)
    config = json.loads((other / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    return first, other


async def ask(client: httpx.AsyncClient, model: str | None, path: str = "completions") -> tuple[int, Any]:
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    named = {} if model is None else {"model": model}
    reply = await client.post(f"/v1/{path}", json={**named, **prompt, "max_tokens": 4, "seed": 1})
    return reply.status_code, reply.json()


async def test_each_model_is_listed_served_and_read_by_its_own_text(tmp_path: Path) -> None:
    first, other = folders(tmp_path)
    async with cluster() as stack:
        await stack.worker("one", Role.DECODE)
        worker = await stack.worker("two", Role.DECODE, model_name=OTHER, models=(f"{FIRST}=",), linger_s=0.0)
        settings = {"model_name": FIRST, "models": (f"{OTHER}={other}",)}
        async with running_ingress(stack.broker.client("api"), first, **settings) as ingress:
            await eventually(lambda: len(ingress.roster.models) == 2)
            async with httpx.AsyncClient(base_url=f"http://{ingress.address}", timeout=30) as client:
                listed = (await client.get("/v1/models")).json()["data"]
                assert [model["id"] for model in listed] == [FIRST, OTHER]
                answers = {model: await ask(client, model) for model in (FIRST, OTHER, None)}
                assert {status for status, _ in answers.values()} == {200}
                assert [body["model"] for _, body in answers.values()] == [FIRST, OTHER, FIRST]
                texts = {model: body["choices"][0]["text"] for model, (_, body) in answers.items()}
                assert texts[None] == texts[FIRST]
                assert (await ask(client, FIRST, "chat/completions"))[0] == 200
                status, refused = await ask(client, OTHER, "chat/completions")
                assert status == 400
                assert "does not chat" in refused["error"]["message"]
                status, unknown = await ask(client, "nobody's")
                assert (status, unknown["error"]["code"]) == (404, "model_not_found")
                assert FIRST in unknown["error"]["message"]
                assert OTHER in unknown["error"]["message"]

                # The other model's only worker loads the first one: it is known still, and not there.
                message = AssignRoles(
                    epoch=1, incarnation=worker.runtime.incarnation, roles=(Role.DECODE,), model=FIRST
                )
                assert (
                    await stack.ask(subjects.worker_assign(worker.host.worker.worker_id), message, Ack)
                ).fault is None
                await eventually(lambda: worker.host.beat().model == FIRST)
                await eventually(lambda: worker.runtime.state is ProcessState.READY)
                await eventually(lambda: [model.name for model in ingress.roster.models] == [FIRST])
                status, gone = await ask(client, OTHER)
                assert (status, gone["error"]["code"]) == (503, "unavailable")


def test_what_does_not_name_the_models_is_refused() -> None:
    known = {"ISTHMUS_INGRESS_MODEL": "/models/a", "ISTHMUS_INGRESS_MODEL_NAME": "a"}
    config = IngressConfig.load({**known, "ISTHMUS_INGRESS_MODELS": "b=/models/b,c=/models/c"})
    assert config.more_models == {"b": Path("/models/b"), "c": Path("/models/c")}
    for wrong in ("b", "b=", "a=/models/b", "b=/x,b=/y"):
        with pytest.raises(ConfigInvalid, match="ISTHMUS_INGRESS_MODELS"):
            IngressConfig.load({**known, "ISTHMUS_INGRESS_MODELS": wrong})
    with pytest.raises(ConfigInvalid, match="ISTHMUS_INGRESS_MODEL_NAME"):
        IngressConfig.load({"ISTHMUS_INGRESS_MODEL": "/models/a", "ISTHMUS_INGRESS_MODELS": "b=/models/b"})
