"""A real crossing between two kinds of hardware: KV computed on this machine's GPU, decoded on its CPU, and back.

    python tools/gpu_check.py [--device cuda] [--json FILE]

Needs Isthmus with `isthmus[local]` and a torch that sees the GPU; where vLLM is installed for it too, that is checked
as well. Takes a few minutes. Without a GPU it says what it would check and ends with status 0. Status 1: something is
wrong. `--device cpu` runs the same on the CPU, which shows that the script works and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("shared", "kvrelay", "tests/support", *(f"services/{n}" for n in ("worker", "ingress", "planner", "cli")))
sys.path[:0] = [str(ROOT / folder) for folder in (*FOLDERS, "services/prefill-worker", "services/decode-worker")]

import torch  # noqa: E402

from isthmus_shared.kv.layout import KvLayout  # noqa: E402
from isthmus_shared.kv.paged import PagedKv  # noqa: E402
from isthmus_shared.kv.profiles import PROFILES  # noqa: E402
from isthmus_shared.kv.staging import gather_rows, scatter_rows  # noqa: E402
from isthmus_testing.engines import prompt_of  # noqa: E402
from isthmus_testing.local_cluster import local_cluster  # noqa: E402
from isthmus_testing.openai_client import Case, aggregated, assert_same, client, complete  # noqa: E402
from isthmus_testing.tiny_checkpoints import Family, write_tiny_checkpoint  # noqa: E402

TOKENS, HEADS, HEAD_DIM = 2048, 8, 128
TOLERANCE = 2e-3
"""Of logprobs: a GPU sums fp32 in another order."""
PROMPTS = (1, 31, 32, 33, 700, 1300)
CHECKS = {
    "forms": "every vendor's cache form on {0}: from the CPU's through staging into it, and back, bit for bit",
    "reference": "a cluster: the reference engine prefills on {0}, decodes on cpu, and the reverse; the tokens of one",
    "vllm": "a cluster: vLLM prefills on {0}, the reference engine decodes on cpu, and the reverse; the tokens of one",
}


@dataclass(frozen=True)
class Surroundings:
    device: str
    folder: Path


def check_forms(around: Surroundings) -> dict[str, Any]:
    """MB/s by form, of what moved between the device and staging."""
    speeds: dict[str, Any] = {}
    for name, profile in PROFILES.items():
        layout = KvLayout.parse(f"{name}:{profile.block_tokens}:bf16")
        there, here = _cache(layout, around.device), _cache(layout, "cpu")
        table = torch.randperm(here.views[0].blocks)[: -(-TOKENS // profile.block_tokens)]
        torch.manual_seed(3)
        for part in here.views[0].parts:
            part.copy_(torch.randn(part.shape))
        staging = memoryview(bytearray(TOKENS * HEADS * HEAD_DIM * 2))
        began_s, moved = time.perf_counter(), 0
        for source, target in zip(here.views[0].parts, there.views[0].parts, strict=True):
            gather_rows(source, table, 0, TOKENS, [staging])
            wanted = bytes(staging)
            scatter_rows(target, table, 0, TOKENS, [staging.toreadonly()])
            _settle(around.device)
            staging[:] = bytes(len(staging))
            gather_rows(target, table, 0, TOKENS, [staging])
            _settle(around.device)
            assert bytes(staging) == wanted, f"{name}: what came back from {around.device} differs"
            moved += 3 * len(staging)
        speeds[name] = round(moved / (time.perf_counter() - began_s) / 1e6)
    return {"mb_per_s": speeds}


def check_reference(around: Surroundings) -> dict[str, Any]:
    workers = {"device": {"env": {"ISTHMUS_ENGINE_DEVICE": around.device}}, "cpu": {}}
    return asyncio.run(_both_ways(around, workers))


def check_vllm(around: Surroundings) -> dict[str, Any]:
    arguments = {"dtype": "float32", "max_model_len": 4096, "enforce_eager": True, "max_num_seqs": 16}
    arguments |= {"kv_cache_memory_bytes": 256 << 20}
    if around.device != "cpu":
        arguments |= {"attention_backend": "TRITON_ATTN"}  # the one that computes in fp32
    workers = {"device": {"engine": "vllm", "vllm": arguments}, "cpu": {}}
    return asyncio.run(_both_ways(around, workers))


async def _both_ways(around: Surroundings, workers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    answered = 0
    for family in (Family.LLAMA, Family.QWEN3):
        model = write_tiny_checkpoint(around.folder / family.value, family)
        cases = [Case(prompt_of(tokens, seed=tokens)) for tokens in PROMPTS]
        expected = await aggregated(model, cases)
        for producer, consumer in (("device", "cpu"), ("cpu", "device")):
            nodes = [
                {"id": "node-a", "workers": [{"id": "prefill", "role": "prefill", **workers[producer]}]},
                {"id": "node-b", "workers": [{"id": "decode", "role": "decode", **workers[consumer]}]},
            ]
            folder = around.folder / f"{family}-{producer}"
            folder.mkdir()
            spec = folder / "cluster.yaml"
            spec.write_text(json.dumps({"model": {"path": str(model)}, "nodes": nodes}))
            with local_cluster([str(spec)], folder / "state") as cluster:
                async with client(cluster.url) as http:
                    answers = await asyncio.gather(*(complete(http, case) for case in cases))
                for answer, outcome in zip(answers, expected, strict=True):
                    assert_same(answer, outcome, tolerance=TOLERANCE)
                loaded = (await cluster.metrics("decode"))["isthmus_worker_kv_in_bytes_total"]
                assert loaded > 0, "no KV crossed"
                await cluster.until_idle()
            answered += len(answers)
    return {"requests": answered}


def _cache(layout: KvLayout, device: str) -> PagedKv:
    blocks = 2 * -(-TOKENS // layout.block_tokens)
    with torch.device(device):
        return PagedKv(layout, layers=1, kv_heads=HEADS, head_dim=HEAD_DIM, blocks=blocks)


def _settle(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def missing(check: str, device: str) -> str | None:
    """Why that one cannot be made here."""
    if device != "cpu" and not torch.accelerator.is_available():
        return "torch sees no GPU"
    if check == "vllm" and find_spec("vllm") is None:
        return "vLLM is not installed"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="torch's name of it")
    parser.add_argument("--only", choices=list(CHECKS), action="append", help="may be repeated; all")
    parser.add_argument("--json", type=Path, help="write what was found there")
    arguments = parser.parse_args()
    run: dict[str, Callable[[Surroundings], dict[str, Any]]] = {
        "forms": check_forms,
        "reference": check_reference,
        "vllm": check_vllm,
    }
    found: dict[str, Any] = {"device": arguments.device}
    failed = False
    for check in arguments.only or CHECKS:
        what = CHECKS[check].format(arguments.device)
        why = missing(check, arguments.device)
        if why is not None:
            print(f"NOT RUN  {check}: {why}; it would check {what}")
            found[check] = {"not_run": why}
            continue
        began_s = time.perf_counter()
        try:
            with tempfile.TemporaryDirectory() as folder:
                found[check] = run[check](Surroundings(arguments.device, Path(folder)))
        except (AssertionError, RuntimeError, OSError) as error:
            failed = True
            found[check] = {"failed": str(error)}
            print(f"FAILED   {check}: {error}")
            continue
        found[check]["took_s"] = round(time.perf_counter() - began_s, 1)
        print(f"PASSED   {check}: {what} {json.dumps(found[check])}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
