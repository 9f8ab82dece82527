"""Whole blocks between a cache and staging, each in one pass and, wherever torch or numpy can, in one call.

Elements are moved as bits, in the widest units that both sides have in one piece: copying bf16 by 16 bytes at a time
takes an eighth of the instructions. What is behind each choice here was measured (`bench/kv_forms.py`).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ids = npt.NDArray[np.int64]
"""Block ids [n], each of them a block of the cache: whoever calls has made sure of it."""
_UNITS = ((16, torch.complex128), (8, torch.int64), (4, torch.int32), (2, torch.int16))
_PLAIN = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}
MIN_TAKEN_BYTES = 128
"""Below it the index of a row, 8 bytes, costs more than it spares."""
PAD_BYTES = 64
"""A cache line: rows of a power of two bytes would all fall into the same few sets of the cache."""


def gather_blocks(part: Tensor, ids: Ids, place: Tensor) -> None:
    """`place` [n, tokens…, heads, dims…] becomes blocks `ids` of `part` [blocks, tokens…, heads, dims…]."""
    if part.device.type != "cpu":
        part, place = _codes(part), _codes(place)
        place.copy_(part.index_select(0, torch.from_numpy(ids).to(part.device)), non_blocking=True)
        return
    if _take_rows(part, ids, place):
        return
    cache, target = widen(part, place)
    if neighbours(ids):
        target.copy_(cache[int(ids[0]) : int(ids[0]) + len(ids)])
    else:
        torch.index_select(cache, 0, torch.from_numpy(ids), out=target)


def scatter_blocks(part: Tensor, ids: Ids, place: Tensor) -> None:
    """The way back. `ids` are different from each other."""
    if part.device.type != "cpu":
        part, place = _codes(part), _codes(place)
        rows = place.to(part.device, non_blocking=True)
        part.index_copy_(0, torch.from_numpy(ids).to(part.device), rows)
        return
    if part.stride(1) == 1 and part.shape[1] > 1:
        _scatter_transposed(part, ids, place)
        return
    whole = slice(int(ids[0]), int(ids[0]) + len(ids)) if neighbours(ids) else None
    run, axes = _run(part, place)
    if whole is not None and run * part.element_size() < MIN_TAKEN_BYTES:
        cache, source = widen(part, place)
        cache[whole].copy_(source)
    else:
        _array(part, axes, run)[ids if whole is None else whole] = _array(place, axes, run)


def _codes(tensor: Tensor) -> Tensor:
    """FP8 as bytes: not every accelerator's build indexes it."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def neighbours(ids: Ids) -> bool:
    """Each id follows the one before it."""
    return bool(ids[-1] - ids[0] == len(ids) - 1 and (ids[1:] - ids[:-1] == 1).all())


def widen(cache: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Both, of the same shape but for the first axis, in the widest elements that their last axes allow."""
    ones = [axis for axis in range(1, cache.dim()) if cache.shape[axis] == 1]
    cache, place = cache.squeeze(ones), place.squeeze(ones)
    if cache.stride(-1) == place.stride(-1) == 1:
        for size, dtype in _UNITS:
            if size > cache.element_size() and fits(cache, size) and fits(place, size):
                return cache.view(dtype), place.view(dtype)
    return cache, place


def fits(tensor: Tensor, size: int) -> bool:
    """Whether a tensor whose last axis is dense can be viewed in elements of `size` bytes.

    Its address counts too: torch may move complex128 by instructions that fault where it is not a multiple of 16.
    """
    itemsize = tensor.element_size()
    if tensor.data_ptr() % size:
        return False
    steps = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return all(step * itemsize % size == 0 for step in steps)


def _take_rows(part: Tensor, ids: Ids, place: Tensor) -> bool:
    """Where runs lie apart in the cache but together in staging (K beside V): run by run, quickest by memcpy."""
    run, axes = _run(part, place)
    size, strides = run * part.element_size(), part.stride()[:axes]
    steps = [step for step, count in zip(strides, part.shape, strict=False) if count > 1]
    gaps = axes > 1 and min(steps, default=0) > run
    if not gaps or size < MIN_TAKEN_BYTES or any(step % run for step in strides) or not place.is_contiguous():
        return False
    index = ids * (strides[0] // run)
    for step, count in zip(strides[1:], part.shape[1:axes], strict=True):
        index = index[..., None] + np.arange(count) * (step // run)
    whole = sum((count - 1) * step for count, step in zip(part.shape, strides, strict=False)) + run
    cache = _array(part.as_strided((whole // run, run), (run, 1)), 1, run)
    target = _array(place.view(-1, run), 1, run)
    np.take(cache, index.reshape(-1), out=target, mode="clip")
    return True


def _run(cache: Tensor, place: Tensor) -> tuple[int, int]:
    """Length in elements of the pieces that are dense in both, and how many axes are left."""
    run, axes = 1, cache.dim()
    while axes > 1 and all(one.shape[axes - 1] == 1 or one.stride(axes - 1) == run for one in (cache, place)):
        run *= cache.shape[axes - 1]
        axes -= 1
    return run, axes


def _array(tensor: Tensor, axes: int, run: int) -> npt.NDArray[Any]:
    """The first `axes` axes of `tensor`, in units of `run` elements; it must outlive the array."""
    itemsize = tensor.element_size()
    strides = tuple(step * itemsize for step in tensor.stride()[:axes])
    shape = tuple(tensor.shape[:axes])
    span = sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) + run * itemsize
    memory = memoryview((ctypes.c_ubyte * span).from_address(tensor.data_ptr())).cast("B")
    unit = _PLAIN.get(run * itemsize, f"V{run * itemsize}")
    return np.ndarray(shape, dtype=unit, buffer=memory, strides=strides)


def _scatter_transposed(part: Tensor, ids: Ids, place: Tensor) -> None:
    """Tokens innermost (the CPU backend's K): block by block by way of rows that are not a power of two apart."""
    tokens, _, heads, dim, _ = part.shape[1:]
    pad = PAD_BYTES // part.element_size()
    scratch = torch.empty((tokens, heads * dim + pad), dtype=part.dtype)[:, : heads * dim].view(tokens, heads, dim)
    for index, block in enumerate(ids.tolist()):
        scratch.copy_(place[index, :, 0, :, :, 0])
        part[block, :, 0, :, :, 0].copy_(scratch)
