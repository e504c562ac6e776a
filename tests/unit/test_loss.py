"""Tests of the loss in chunks, plain, compiled and by liger-kernel: values and gradients are those of torch's cross-entropy."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from llmtrain import loss
from llmtrain.errors import ModelError
from llmtrain.loss import IGNORE_INDEX, ROW_MULTIPLE, summed_cross_entropy, summed_loss
from tests.inside_torch import compilations, forget_compilations

POSITIONS, WIDTH, VOCABULARY = (3, 4), 8, 11


def drawn(dtype: torch.dtype, with_bias: bool):
    """Return (hidden, weight, bias or None, labels). Two of the labels are ignored."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((*POSITIONS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    hidden, weight, bias = (torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes)
    labels = torch.randint(0, VOCABULARY, POSITIONS, generator=generator)
    labels[1, 2:] = IGNORE_INDEX
    return hidden, weight, bias if with_bias else None, labels


def expected(hidden, weight, bias, labels):
    """Return the loss and three times its gradients, computed from all logits at once in at least fp32."""
    inputs = [one for one in (hidden, weight, bias) if one is not None]
    logits = F.linear(hidden, weight, bias).flatten(0, 1)
    wide = torch.promote_types(logits.dtype, torch.float32)
    value = F.cross_entropy(logits.to(wide), labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)
    return value, *torch.autograd.grad(3 * value, inputs)


def found(value, inputs):
    return value, *torch.autograd.grad(3 * value, [one for one in inputs if one is not None])


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_chunked_loss_and_gradients_are_those_of_cross_entropy(chunk, with_bias):
    *inputs, labels = drawn(torch.float64, with_bias)
    ours = found(summed_cross_entropy(*inputs, labels, chunk), inputs)
    for mine, theirs in zip(ours, expected(*inputs, labels), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_factor_of_the_loss_is_not_rounded_to_the_gradients_precision() -> None:
    """The factor, 1 / tokens of a batch, would be off by up to 0.4 % in bf16, and with it all gradients."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 64, generator=generator).bfloat16().requires_grad_() for rows in (256, 50))
    labels = torch.randint(0, 50, (256,), generator=generator)
    factor = 1 / 122_880
    sums = []
    for scale in (1.0, factor):
        gradients = torch.autograd.grad(
            scale * summed_cross_entropy(hidden, weight, None, labels, 64), (hidden, weight)
        )
        sums.append([float(gradient.double().abs().sum()) for gradient in gradients])
    for whole, scaled in zip(*sums, strict=True):
        assert scaled == pytest.approx(whole * factor, rel=3e-4)


@pytest.mark.parametrize(
    ("dtype", "chunk", "close"),
    [
        pytest.param(torch.float64, 6, 1e-12, marks=pytest.mark.deep),
        pytest.param(torch.float64, 5, 1e-12, marks=pytest.mark.deep),
        pytest.param(torch.bfloat16, 5, 2e-2, marks=pytest.mark.deep),
    ],
    ids=["fp64", "fp64-uneven", "bf16-uneven"],
)
def test_compiled_loss_and_gradients_are_those_of_cross_entropy(dtype, chunk, close):
    """Chunks that do not divide the positions have two shapes, each of which takes seconds to compile."""
    *inputs, labels = drawn(dtype, with_bias=True)
    ours = found(summed_cross_entropy(*inputs, labels, chunk, compiled=True), inputs)
    for mine, theirs in zip(ours, expected(*inputs, labels), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=close, atol=close)


def test_a_loss_that_is_traced_for_compilation_is_the_same(monkeypatch):
    """The loss is traced without the compiler itself, which takes seconds."""
    traced = torch.compile(loss._loss_and_gradient, dynamic=False, backend="eager")
    monkeypatch.setattr(loss, "_compiled", lambda dynamic: traced)
    *inputs, labels = drawn(torch.float64, with_bias=True)
    ours = found(summed_cross_entropy(*inputs, labels, 6, compiled=True), inputs)
    for mine, theirs in zip(ours, expected(*inputs, labels), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def with_gaps(hidden: torch.Tensor, vocabulary: int, chunk: int) -> torch.Tensor:
    """Return memory for logits with gaps between rows, as on a GPU. The gaps are NaN."""
    return hidden.new_full((min(chunk, len(hidden)), -(-vocabulary // ROW_MULTIPLE) * ROW_MULTIPLE), torch.nan)


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk", [5, 1000])
def test_gaps_between_rows_of_logits_change_nothing(monkeypatch, chunk, with_bias, is_traced):
    pitches, computed = set(), loss._loss_and_gradient

    def seen(logits, *rest):
        pitches.add(logits.stride(0))
        return traced(logits, *rest)

    forget_compilations()
    traced = torch.compile(computed, dynamic=False, backend="eager") if is_traced else computed
    monkeypatch.setattr(loss, "_loss_and_gradient", seen)
    monkeypatch.setattr(loss, "_room_for_logits", with_gaps)
    *inputs, labels = drawn(torch.float64, with_bias)
    ours = found(summed_cross_entropy(*inputs, labels, chunk), inputs)
    for mine, theirs in zip(ours, expected(*inputs, labels), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert pitches == {ROW_MULTIPLE} and not compilations().breaks


def test_a_loss_without_gradients_is_the_same_and_computes_none(monkeypatch):
    def recorded(logits, labels, wide, needs_grad):
        computed.append(needs_grad)
        return whole(logits, labels, wide, needs_grad)

    whole, computed = loss._loss_and_gradient, []
    monkeypatch.setattr(loss, "_loss_and_gradient", recorded)
    *inputs, labels = drawn(torch.float64, with_bias=False)
    with torch.no_grad():
        found = summed_cross_entropy(*inputs, labels, chunk=5)
    torch.testing.assert_close(found, expected(*inputs, labels)[0].detach(), rtol=1e-12, atol=1e-12)
    assert set(computed) == {False}


@pytest.mark.parametrize(("is_installed", "lacks"), [(False, "is not installed; pip install"), (True, "needs a GPU")])
def test_liger_without_the_library_or_a_gpu_is_refused(monkeypatch, is_installed, lacks):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if is_installed else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match=f"loss_kernel is liger.*{lacks}"):
        summed_loss("liger", chunk=5, compiled=False)


def test_liger_gets_rows_and_sums_gradients_in_fp32(monkeypatch):
    """A stub takes the place of the library, which needs a GPU."""

    def fused(flat, weight, labels, bias, ignore_index, reduction, accum_dtype):
        asked.update(reduction=reduction, accum_dtype=accum_dtype)
        return F.cross_entropy(F.linear(flat, weight, bias), labels, ignore_index=ignore_index, reduction=reduction)

    asked = {}
    functional = SimpleNamespace(liger_fused_linear_cross_entropy=fused)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", functional)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    loss = summed_loss("liger", chunk=5, compiled=False)
    for dtype, wide in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        *inputs, labels = drawn(dtype, with_bias=True)
        torch.testing.assert_close(loss(*inputs, labels), expected(*inputs, labels)[0], check_dtype=False)
        assert asked == {"reduction": "sum", "accum_dtype": wide}


@pytest.mark.gpu
@pytest.mark.skipif(not importlib.util.find_spec("liger_kernel"), reason="liger-kernel is not installed")
def test_ligers_loss_and_gradients_are_those_of_cross_entropy():
    from llmtrain.loss import liger_cross_entropy

    for with_bias in (False, True):
        *inputs, labels = (one if one is None else one.detach().to("cuda") for one in drawn(torch.float32, with_bias))
        inputs = [one if one is None else one.requires_grad_() for one in inputs]
        ours = found(liger_cross_entropy(*inputs, labels), inputs)
        for mine, theirs in zip(ours, expected(*inputs, labels), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_no_more_is_held_than_the_memory_estimate_says(monkeypatch) -> None:
    """The bound counts one chunk of logits, because chunks follow one another. Backward adds nothing."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    peaks = importlib.import_module("peaks")
    positions, width, vocabulary, chunk = 1024, 64, 2048, 128
    hidden = torch.randn(positions, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    labels = torch.zeros(positions, dtype=torch.long)

    def once() -> None:
        loss = 0.5 * summed_cross_entropy(hidden, weight, None, labels, chunk)
        torch.autograd.grad(loss, (hidden, weight))

    once()
    logits, head = chunk * vocabulary, vocabulary * width
    assert peaks.allocator_peak(once) <= 4 * (2 * logits + head + positions * width) + 64 * chunk
