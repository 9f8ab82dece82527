"""Random crossings of KV between any two layouts, block sizes, shardings and FP8 flavours; each by its seed.

python -m isthmus_testing.kv_crossings --cases 10000
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from pydantic import ValidationError
from torch import Tensor

from isthmus_shared.errors import ManifestMismatch, TransferFailed
from isthmus_shared.kv import form as forms
from isthmus_shared.kv.canonical import CanonicalIndex, KvPart
from isthmus_shared.kv.form import CacheForm, run_elements
from isthmus_shared.kv.fp8 import expand_scales
from isthmus_shared.kv.manifest import KvDtype, KvManifest, KvScales, ScaleKind
from isthmus_shared.kv.negotiate import require_exchangeable
from isthmus_shared.kv.paged import TORCH_DTYPES
from isthmus_shared.kv.profiles import PROFILES
from isthmus_shared.kv.reshard import Heads, heads_of, plan_flows
from isthmus_shared.kv.shape import GroupShape, KvShape
from isthmus_shared.kv.staging import gather_rows, scatter_rows
from isthmus_shared.kv.views import LayerViews, gather, scatter, views_of

Sizes = dict[str, int]
FN, FNUZ = KvDtype.FP8_E4M3FN, KvDtype.FP8_E4M3FNUZ
RATIOS = ((1, 1), (1, 2), (2, 1), (1, 8), (8, 1), (4, 2), (2, 4), (2, 2))
LAYERS = 2
CONTENT_ORDERS = ("lABCD", "lACBD", "lBACD", "AlBCD", "AlCBD", "ABlCD")
"""Those that vLLM knows for [blocks, heads, tokens, content], which are A, B, C and D."""


@dataclass(frozen=True)
class Layout:
    """A form, and the order in which a tensor of it lies in memory: letters of its axes, `l` is the layers."""

    name: str
    form: CacheForm
    memory: str
    """Axes of the memory; the tensor's axes are those of `form`."""
    runs: str = ""


def _dense(name: str, form: CacheForm, runs: str = "") -> Layout:
    return Layout(name, form, "l" + "".join("ABCDEF"[i] for i in range(len(form.parts[0]))), runs)


LAYOUTS = (
    _dense("nhd", forms.NHD),
    _dense("hnd", forms.HND),
    _dense("packed K", forms.PACKED_K, "x"),
    _dense("stacked", forms.STACKED),
    _dense("stacked in the block", forms.BLOCK_STACKED),
    _dense("head slots", forms.HEAD_SLOTS),
    _dense("cpu", forms.CPU_ATTN),
    _dense("shuffle", forms.SHUFFLE, "xm"),
    _dense("V transposed too", CacheForm("b h d n x | b h d n"), "x"),
    *(Layout(f"content {order}", forms.CONTENT, order) for order in CONTENT_ORDERS),
    *(_dense(name, profile.form, "xm" if "x" in profile.form.text else "") for name, profile in PROFILES.items()),
)
LATENT_LAYOUTS = (
    _dense("mla", forms.MLA),
    _dense("mla with a head", forms.MLA_HEAD),
    Layout("mla, layers in the block", forms.MLA, "AlBC"),
)


@dataclass
class Side:
    """One rank's caches: of each layer its views."""

    layout: Layout
    heads: Heads
    dtype: KvDtype
    block_tokens: int
    views: list[LayerViews]
    raws: list[Tensor]
    table: Tensor


@dataclass
class Case:
    """What the seed has drawn."""

    seed: int
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.latent = rng.random() < 0.15
        self.kv_heads = 1 if self.latent else rng.choice((1, 2, 4, 8))
        self.dtypes = self._dtypes()
        self.tokens = rng.choice((1, rng.randint(2, 40), rng.randint(1, 150)))
        self.window = None if self.latent or rng.random() < 0.6 else rng.randint(1, 80)
        self.ratio = rng.choice(RATIOS)
        self.scales = rng.choice((None, *ScaleKind)) if self.dtypes[0].is_fp8 else None
        own = rng.choice((1, 8, 16))
        self.granules = (own * rng.choice((1, 2, 4)), own)
        """Tokens that share a scale at the producer and, a divisor of it, at the consumer."""
        self.beyond_fn = self.dtypes == (FNUZ, FN) and rng.random() < 0.3
        self.layouts = tuple(rng.choice(LATENT_LAYOUTS if self.latent else LAYOUTS) for _ in range(2))
        # Head sizes that any run of the dtype divides.
        self.head_dim = rng.choice((16, 32, 48)) if not self.latent else rng.choice((24, 72))
        self.blocks = tuple(self._block(layout, dtype) for layout, dtype in zip(self.layouts, self.dtypes, strict=True))

    def _dtypes(self) -> tuple[KvDtype, KvDtype]:
        first = self.rng.choice(list(KvDtype))
        return (first, self.rng.choice((FN, FNUZ))) if first.is_fp8 else (first, first)

    def _block(self, layout: Layout, dtype: KvDtype) -> int:
        step = run_elements(dtype.itemsize_bytes) if "m" in layout.runs else 1
        return step * self.rng.choice((1, 2, 3, 4)) if step > 1 else self.rng.choice((1, 3, 8, 16, 32, 128))

    def shape(self, side: int) -> KvShape:
        dtype = self.dtypes[side]
        group = GroupShape(
            layer_ids=tuple(range(LAYERS)),
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            window_tokens=self.window,
            latent=self.latent,
            scales=self._scales(dtype, side),
        )
        return KvShape("model", dtype, (group,))

    def _scales(self, dtype: KvDtype, side: int) -> KvScales | None:
        if not dtype.is_fp8:
            return None
        if self.scales is ScaleKind.BLOCK:
            return KvScales(kind=ScaleKind.BLOCK, block_tokens=self.granules[side])
        unit = 2.0 if dtype is FNUZ else 1.0
        kind = ScaleKind.TENSOR if self.scales is None else self.scales
        count = LAYERS * (self.kv_heads if kind is ScaleKind.HEAD else 1)
        values = tuple(unit * (1 + i / 8) for i in range(count))
        return KvScales(kind=kind, k=values, v=() if self.latent else tuple(3 * value for value in values))

    def side(self, side: int, rank: int) -> Side:
        heads = Heads(0, 1) if self.latent else heads_of(rank, self.ratio[side], self.kv_heads)
        size, layout, dtype = self.blocks[side], self.layouts[side], self.dtypes[side]
        needed = -(-self.tokens // size)
        blocks = needed + self.rng.randint(1, 3)
        start = self.rng.randint(0, blocks - needed)
        order = list(range(blocks))
        if self.rng.random() < 0.7:
            self.rng.shuffle(order)
        raws, views = _allocate(layout, dtype, blocks, size, heads.count, self.head_dim, self.rng)
        return Side(layout, heads, dtype, size, views, raws, torch.tensor(order[start : start + needed]))

    def block_scale(self, layer: int, part: int, block: Tensor, head: Tensor) -> Tensor:
        """Of one head of one block of scales, fp32, another for each; any shapes that broadcast."""
        return (1 + layer + 10 * part + 100 * head + 1000 * block).float() / 64

    def truth(self) -> list[list[Tensor]]:
        """Codes of every layer's parts, whole heads: uint8 [tokens, heads, head_dim · itemsize]."""
        generator = torch.Generator().manual_seed(self.seed)
        size = (self.tokens, self.kv_heads, self.head_dim * self.dtypes[0].itemsize_bytes)
        parts = 1 if self.latent else 2
        every = torch.randint(0, 256, (LAYERS, parts, *size), generator=generator).to(torch.uint8)
        codes = [list(layer.unbind(0)) for layer in every.unbind(0)]
        if self.dtypes == (FNUZ, FN):
            for part in (part for layer in codes for part in layer):
                part[(part & 0x7F) == 0x7F] = 0x11
            if self.beyond_fn:
                codes[-1][-1][-1, 0, 0] = 0xFF
        return codes


def _allocate(
    layout: Layout, dtype: KvDtype, blocks: int, block_tokens: int, heads: int, head_dim: int, rng: random.Random
) -> tuple[list[Tensor], list[LayerViews]]:
    """Caches of all layers with noise in them, as parts of one memory."""
    run = run_elements(dtype.itemsize_bytes)
    sizes = {"b": blocks, "p": 2, "n": block_tokens, "h": heads, "d": head_dim, "x": 1, "m": 1, "1": 1}
    raws, per_layer = [], []
    joined = layout.form.joined
    for axes in layout.form.parts[:1] if joined else layout.form.parts:
        own = dict(sizes)
        for short, long in (("x", "d"), ("m", "n")):
            if short in "".join(axes):
                own[short], own[long] = run, own[long] // run
        shape = [torch.Size([own[letter] for letter in axis]).numel() for axis in axes]
        letters = "ABCDEF"[: len(shape)]
        memory = layout.memory if len(layout.memory) == len(shape) + 1 else "l" + letters
        extent = [LAYERS if letter == "l" else shape["ABCDEF".index(letter)] for letter in memory]
        noise = torch.tensor([rng.randrange(256)], dtype=torch.uint8)
        raw = (torch.arange(torch.Size(extent).numel() * dtype.itemsize_bytes) * 37).to(torch.uint8) + noise
        raw = raw.view(TORCH_DTYPES[dtype]).view(extent).permute([memory.index(letter) for letter in "l" + letters])
        raws.append(raw)
        per_layer.append(raw.unbind(0))
    layers = list(zip(*per_layer, strict=True))
    views = [
        views_of(
            tensors[0] if joined else (tensors[0], tensors[1]),
            layout.form,
            block_tokens=block_tokens,
            kv_heads=heads,
            head_dim=head_dim,
        )
        for tensors in layers
    ]
    return raws, views


def _bits(raws: Sequence[Tensor]) -> list[Tensor]:
    return [raw.contiguous().view(torch.uint8).clone() for raw in raws]


def _memory(data: bytearray, rng: random.Random) -> Callable[[int, int], list[memoryview]]:
    """Staging in slots of some odd size."""
    slot = rng.choice((50, 64, 300, 1000, 1 << 20))

    def views(offset: int, size: int) -> list[memoryview]:
        cuts = [offset, *range((offset // slot + 1) * slot, offset + size, slot), offset + size]
        whole = memoryview(data)
        return [whole[a:b] for a, b in itertools.pairwise(cuts)]

    return views


def cross(case: Case) -> str:
    """Everything from all producer ranks to all consumer ranks. Returns what became of it; asserts that it is right."""
    truth, rng = case.truth(), case.rng
    producers = [case.side(0, rank) for rank in range(case.ratio[0])]
    consumers = [case.side(1, rank) for rank in range(case.ratio[1])]
    for side in producers:
        for layer, views in enumerate(side.views):
            rows = [_slice(part, side, side.heads) for part in truth[layer]]
            scatter(views, side.table, 0, case.tokens, rows)
    before = [_bits(side.raws) for side in consumers]
    flows, flown = plan_flows(case.kv_heads, *case.ratio), []
    for flow in flows:
        theirs = case.shape(0).narrow_heads(flow.heads.start, flow.heads.count).manifest(case.tokens)
        flown.append((flow, theirs, _send(producers[flow.producer_rank], flow.heads, theirs, case)))
    try:
        for rank, side in enumerate(consumers):
            for flow, theirs, data in flown:
                if rank in flow.consumer_ranks:
                    ours = case.shape(1).narrow_heads(flow.heads.start, flow.heads.count).manifest(case.tokens)
                    require_exchangeable(ours, theirs)
                    refuse_wrong(ours, theirs, rng)
                    _receive(side, flow.heads, theirs, data, case)
                    _check_scales(flow.heads, ours, theirs, data, case)
    except TransferFailed:
        assert case.beyond_fn, "only a code that fn does not have is refused"
        return "refused"
    assert not case.beyond_fn, "a code that fn does not have came through"
    for side, bits in zip(consumers, before, strict=True):
        _check(case, side, bits, truth)
    return "crossed"


def _slice(codes: Tensor, side: Side, heads: Heads) -> Tensor:
    return codes[:, heads.start : heads.end].contiguous().view(TORCH_DTYPES[side.dtype])


def _send(side: Side, heads: Heads, manifest: KvManifest, case: Case) -> bytearray:
    index, rng = CanonicalIndex(manifest), case.rng
    data = bytearray(index.total_bytes)
    memory = _memory(data, rng)
    cuts = sorted({0, manifest.prompt_tokens, *(rng.randint(0, manifest.prompt_tokens) for _ in range(2))})
    for start, end in itertools.pairwise(cuts):
        for layer in index.layers:
            views = side.views[layer].narrow_heads(heads.start - side.heads.start, heads.count)
            for part, cache in zip(index.parts(layer), views.parts, strict=True):
                span = index.span(layer, part, start, end)
                if span is not None:
                    pieces = memory(span.offset_bytes, span.size_bytes)
                    gather_rows(cache, side.table, span.token_start, span.token_end, pieces)
    for layer, part in _with_scales(index):
        span, group = index.scales(layer, part), index.group(layer)
        assert span is not None, "it has scales"
        first = group.token_start // case.granules[0]
        blocks = torch.arange(first, first + group.scale_blocks)[:, None]
        scales = case.block_scale(layer, part, blocks, torch.arange(heads.start, heads.end))
        data[span.offset_bytes : span.offset_bytes + span.size_bytes] = scales.numpy().tobytes()
    return data


def _with_scales(index: CanonicalIndex) -> list[tuple[int, KvPart]]:
    return [(layer, part) for layer in index.layers for part in index.parts(layer) if index.scales(layer, part)]


def _check_scales(heads: Heads, ours: KvManifest, theirs: KvManifest, data: bytearray, case: Case) -> None:
    """Every token finds its block's scale in the consumer's own, smaller blocks."""
    index, group = CanonicalIndex(theirs), ours.groups[0]
    start, end = group.token_start, group.token_end
    for layer, part in _with_scales(index):
        span = index.scales(layer, part)
        assert span is not None, "it has scales"
        came = torch.frombuffer(data, dtype=torch.float32, count=span.size_bytes // 4, offset=span.offset_bytes)
        granule, own = case.granules
        mine = expand_scales(came.view(-1, heads.count), granule, start, end, own)
        assert len(mine) == group.scale_blocks, "as many as the consumer's manifest says"
        tokens = torch.arange(start, end)
        wanted = case.block_scale(layer, part, tokens[:, None] // granule, torch.arange(heads.start, heads.end))
        assert torch.equal(mine[tokens // own - start // own], wanted), f"scales of layer {layer} came changed"


def _receive(side: Side, heads: Heads, manifest: KvManifest, data: bytearray, case: Case) -> None:
    index, memory = CanonicalIndex(manifest), _memory(data, case.rng)
    for layer in index.layers:
        views = side.views[layer].narrow_heads(heads.start - side.heads.start, heads.count)
        for part, cache in zip(index.parts(layer), views.parts, strict=True):
            span = index.whole(layer, part)
            pieces = [view.toreadonly() for view in memory(span.offset_bytes, span.size_bytes)]
            flavours = case.dtypes if case.dtypes[0].is_fp8 else None
            scatter_rows(cache, side.table, span.token_start, span.token_end, pieces, flavours=flavours)


def _check(case: Case, side: Side, before: list[Tensor], truth: list[list[Tensor]]) -> None:
    """The visible tokens have their values, and nothing else in the cache has changed."""
    group = case.shape(1).manifest(case.tokens).groups[0]
    start, end = group.token_start, group.token_end
    noise = _bits(side.raws)
    for layer, views in enumerate(side.views):
        shape = (end - start, side.heads.count, case.head_dim)
        got = [torch.zeros(shape, dtype=TORCH_DTYPES[side.dtype]) for _ in views.parts]
        gather(views, side.table, start, end, got)
        for mine, codes in zip(got, truth[layer], strict=True):
            wanted = codes[start:end, side.heads.start : side.heads.end].contiguous()
            assert _same(mine, wanted, case.dtypes), f"layer {layer} came changed"
    # Put back what was there: then all is as it was.
    old = [torch.zeros_like(raw) for raw in side.raws]
    for raw, bits in zip(old, before, strict=True):
        raw.copy_(bits.view(raw.dtype).view(raw.shape))
    assert any(not torch.equal(a, b) for a, b in zip(noise, before, strict=True)), "something was written"
    _restore(case, side, old, start, end)
    assert all(torch.equal(a, b) for a, b in zip(_bits(side.raws), before, strict=True)), "a stray byte was written"


def _restore(case: Case, side: Side, old: list[Tensor], start: int, end: int) -> None:
    for layer, views in enumerate(side.views):
        tensors = [raw[layer] for raw in old]
        former = views_of(
            tensors[0] if side.layout.form.joined else (tensors[0], tensors[1]),
            side.layout.form,
            block_tokens=side.block_tokens,
            kv_heads=side.heads.count,
            head_dim=case.head_dim,
        )
        for part, source in zip(views.parts, former.parts, strict=True):
            tokens = torch.arange(start, end)
            within = tokens % side.block_tokens
            places = (side.table[tokens // side.block_tokens], within // part.shape[2], within % part.shape[2])
            size = part.element_size()
            codes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
            part.view(codes)[places] = source.view(codes)[places]


def _same(got: Tensor, codes: Tensor, dtypes: tuple[KvDtype, KvDtype]) -> bool:
    if dtypes[0] is dtypes[1]:
        return torch.equal(got.view(torch.uint8), codes)
    unit = {FN: 1.0, FNUZ: 2.0}
    wanted = codes.view(TORCH_DTYPES[dtypes[0]]).float() * unit[dtypes[0]]
    return torch.equal((got.float() * unit[dtypes[1]]).nan_to_num(nan=9e9), wanted.nan_to_num(nan=9e9))


def refuse_wrong(ours: KvManifest, theirs: KvManifest, rng: random.Random) -> None:
    """Change one thing in their manifest: it must be refused, or be no manifest at all."""
    fields = theirs.model_dump(mode="json")
    group = fields["groups"][0]
    changes: dict[str, Callable[[], object]] = {
        "fingerprint": lambda: fields.update(model_fingerprint="another"),
        "version": lambda: fields.update(version=99),
        "prompt": lambda: fields.update(prompt_tokens=theirs.prompt_tokens + 1),
        "dtype": lambda: fields.update(dtype="fp16" if ours.dtype is not KvDtype.FP16 else "bf16"),
        "group dtype": lambda: group.update(dtype="fp16" if ours.dtype is not KvDtype.FP16 else "bf16"),
        "fewer layers": lambda: group.update(layer_ids=group["layer_ids"][:-1]),
        "other layers": lambda: group.update(layer_ids=[one + 1 for one in group["layer_ids"]]),
        "layer order": lambda: group.update(layer_ids=group["layer_ids"][::-1]),
        "heads": lambda: group.update(kv_heads=group["kv_heads"] + 1),
        "head start": lambda: group.update(head_start=group["head_start"] + 1, heads_total=99),
        "model heads": lambda: group.update(heads_total=(group["heads_total"] or group["kv_heads"]) + 1),
        "head dim": lambda: group.update(head_dim=group["head_dim"] * 2),
        "window": lambda: group.update(window_tokens=(group["window_tokens"] or 7) + 1, kind="sliding"),
        "kind": lambda: group.update(window_tokens=None, kind="latent" if ours.groups[0].kind == "full" else "full"),
        "token start": lambda: group.update(token_start=group["token_start"] + 1),
        "token end": lambda: group.update(token_end=group["token_end"] - 1),
        "twice": lambda: fields.update(groups=fields["groups"] * 2),
        "scales": lambda: group.update(scales={"kind": "tensor", "k": [7.0] * LAYERS, "v": [7.0] * LAYERS}),
        "unknown": lambda: group.update(colour="blue"),
    }
    name = rng.choice(list(changes))
    changes[name]()
    try:
        require_exchangeable(ours, KvManifest.model_validate(fields))
    except ManifestMismatch as error:
        if not (error.param and error.why and error.todo):
            raise AssertionError(f"the refusal of another {name} does not say enough: {error.text}") from error
        return
    except ValidationError:
        return
    raise AssertionError(f"a manifest with another {name} was let through")


def run(cases: int, *, first: int = 0) -> Counter[str]:
    """Cases by their seeds, and what became of them. An assertion names the seed."""
    became: Counter[str] = Counter()
    for seed in range(first, first + cases):
        case = Case(seed)
        try:
            became[cross(case)] += 1
        except Exception as error:
            error.add_note(f"seed {seed}: {case.layouts}, blocks of {case.blocks}, {case.dtypes}, {case.ratio}")
            raise
        became.update(layout.name for layout in case.layouts)
        became[f"{case.ratio[0]}:{case.ratio[1]}"] += 1
    return became


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    began_s = time.perf_counter()
    became = run(options.cases, first=options.first)
    lines = [f"{options.cases} crossings in {time.perf_counter() - began_s:.0f} s"]
    lines += [f"{count:8d}  {name}" for name, count in became.most_common()]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
