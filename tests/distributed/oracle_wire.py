"""Sums over a wire in NumPy: each message is rounded and their sum once more, or only the largest values of each are sent."""

from __future__ import annotations

import math

import numpy as np

from llmtrain.config import WireSection
from tests.unit.test_wire import BLOCK, rounded


def summed(messages: np.ndarray, wire: WireSection) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of `messages`, [ranks, elements], and what each rank's message left out."""
    if wire.kind != "topk":
        return rounded_sum(messages, wire.kind)
    sent = np.array([largest(message, wire.keep, wire.values) for message in messages])
    return sent.sum(0), messages - sent


def largest(message: np.ndarray, keep: int, values: str) -> np.ndarray:
    """Return what is sent of one message, with zeros elsewhere."""
    sent = np.zeros_like(message)
    for start in range(0, len(message), 4096):
        chunk = message[start : start + 4096]
        order = np.argsort(-np.nan_to_num(np.abs(chunk), nan=np.inf, posinf=np.inf), kind="stable")[
            : math.ceil(keep * len(chunk) / 4096)
        ]
        for places in (order[: (len(order) + 1) // 2], order[(len(order) + 1) // 2 :]) if values == "2bit" else ():
            if len(places):
                level = np.float64(np.float32(np.abs(chunk[places]).mean()))
                sent[start + places] = np.where(chunk[places] < 0, -level, level)
        if values == "fp32":
            sent[start + order] = chunk[order]
    return sent


def rounded_sum(messages: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of `messages`, [ranks, elements], and what each rank's rounding left out. A rank also rounds its chunk of the
    sum. In float64 the sum of a few rounded values has no error, so the order of additions does not matter."""
    ranks, numel = messages.shape
    padded = whole_blocks(messages)
    total = rounded(padded, kind).sum(0)
    result = rounded(total, kind)
    lost = padded - rounded(padded, kind)
    chunk = math.ceil(padded.shape[1] // BLOCK / ranks) * BLOCK
    for rank in range(ranks):
        part = slice(rank * chunk, (rank + 1) * chunk)
        lost[rank, part] += (total - result)[part]
    return result[:numel], lost[:, :numel]


def whole_blocks(values: np.ndarray) -> np.ndarray:
    """Pad [..., n] with zeros to a multiple of BLOCK."""
    missing = -values.shape[-1] % BLOCK
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
