"""Masks against a brute-force reading of the rules, and packed rows against documents that stand alone."""

import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import MissingExtraError, SettingsError
from tests.properties import examples

pytest.importorskip("torch", reason="needs torch")

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.torch_version import TorchVersion

from headrace.torch.masks import (
    attention_mask,
    block_mask,
    mask_from_segments,
    mask_mod_from_segments,
    segments_from_tokens,
)

EDGE = 2
ROWS = st.integers(0, 14).flatmap(
    lambda length: st.lists(st.lists(st.integers(0, 3), min_size=length, max_size=length), max_size=3).map(
        lambda rows: np.array(rows, np.int64).reshape(len(rows), length)
    )
)


@pytest.fixture
def nothing_compiled() -> None:
    """torch compiles for so many shapes and no more, whichever tests have come before."""
    torch.compiler.reset()


def unfused(test: Any) -> Any:
    ignored = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
    return ignored(pytest.mark.usefixtures("nothing_compiled")(test))


def documents_by_hand(row: list[int], kind: str) -> list[int]:
    """The number of each token's document, walking from left to right."""
    numbers, number = [], 1
    for place, token in enumerate(row):
        if kind == "bos_id" and token == EDGE and place > 0:
            number += 1
        numbers.append(number)
        if kind == "eos_id" and token == EDGE:
            number += 1
    return numbers


def mask_by_hand(segments: list[int], causal: bool) -> list[list[bool]]:
    return [
        [a == b and (not causal or key <= query) for key, b in enumerate(segments)]
        for query, a in enumerate(segments)
    ]


def packed(lengths: list[int], padding: int = 0) -> Tensor:
    """The segment ids of one row, as the loader gives them."""
    ids = [number for number, length in enumerate(lengths, 1) for _ in range(length)]
    return torch.tensor(ids + [0] * padding, dtype=torch.int32)


def slices(lengths: list[int]) -> list[slice]:
    return [slice(a, b) for a, b in pairwise([0, *np.cumsum(lengths).tolist()])]


@given(ROWS, st.sampled_from(["eos_id", "bos_id"]), st.booleans())
@examples(60)
def test_the_mask_of_tokens_is_what_the_rules_say(rows: Any, kind: str, causal: bool) -> None:
    tokens = torch.from_numpy(rows)
    expected = [documents_by_hand(row, kind) for row in rows.tolist()]
    segments = segments_from_tokens(tokens, **{kind: EDGE})
    mask = attention_mask(tokens, causal=causal, **{kind: EDGE})
    assert (segments.dtype, segments.shape) == (torch.int32, tokens.shape)
    assert (mask.dtype, mask.shape) == (torch.bool, (*tokens.shape, tokens.shape[1]))
    assert segments.tolist() == expected
    assert mask.tolist() == [mask_by_hand(row, causal) for row in expected]
    for number, row in enumerate(tokens):
        assert torch.equal(attention_mask(row, causal=causal, **{kind: EDGE}), mask[number])


@given(st.lists(st.integers(1, 6), max_size=5), st.integers(0, 5), st.booleans())
@examples(60)
def test_no_document_sees_another_and_nothing_but_padding_sees_padding(
    lengths: list[int], padding: int, causal: bool
) -> None:
    segments = packed(lengths, padding)
    mask = mask_from_segments(segments[None], causal=causal)[0]
    assert mask.tolist() == mask_by_hand(segments.tolist(), causal)
    parts = slices([*lengths, padding])
    assert mask.sum() == sum(mask[part, part].sum() for part in parts)
    for part in parts:
        inside = torch.ones(part.stop - part.start, part.stop - part.start, dtype=torch.bool)
        assert torch.equal(mask[part, part], inside.tril() if causal else inside)
    assert mask.diagonal().all(), "a query without a key would be NaN"


def test_the_example_in_the_module() -> None:
    tokens = torch.tensor([7, 2, 5, 6, 2, 9])
    assert segments_from_tokens(tokens, eos_id=2).tolist() == [1, 1, 2, 2, 2, 3]
    assert ["".join(".x"[seen] for seen in row) for row in attention_mask(tokens, eos_id=2).tolist()] == [
        "x.....",
        "xx....",
        "..x...",
        "..xx..",
        "..xxx.",
        ".....x",
    ]


def test_the_end_of_a_document_before_the_first_bos_is_document_one() -> None:
    tokens = torch.tensor([[5, 1, 6], [1, 5, 1]])
    assert segments_from_tokens(tokens, bos_id=1).tolist() == [[1, 2, 2], [1, 1, 2]]


@pytest.mark.parametrize("name", ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"])
def test_every_whole_number_type_gives_the_same_mask(name: str) -> None:
    tokens = torch.tensor([[7, 2, 5, 6, 2, 9]])
    narrow = tokens.to(getattr(torch, name))
    mask = attention_mask(tokens, eos_id=2)
    assert torch.equal(attention_mask(narrow, eos_id=2), mask)
    assert torch.equal(mask_from_segments(segments_from_tokens(tokens, eos_id=2).to(narrow.dtype)), mask)


def test_an_id_too_large_for_the_tokens_type_matches_no_token() -> None:
    assert segments_from_tokens(torch.tensor([44, 44], dtype=torch.int8), eos_id=300).tolist() == [1, 1]


def mask_by_tokens(lengths: list[int], kind: str, causal: bool) -> Tensor:
    tokens = torch.full((1, sum(lengths)), 7)
    for part in slices(lengths):
        tokens[0, part.stop - 1 if kind == "eos_id" else part.start] = EDGE
    return attention_mask(tokens, causal=causal, **{kind: EDGE})


MASKS: dict[str, Callable[[list[int], bool], Tensor]] = {
    "eos": lambda lengths, causal: mask_by_tokens(lengths, "eos_id", causal),
    "bos": lambda lengths, causal: mask_by_tokens(lengths, "bos_id", causal),
    "segments": lambda lengths, causal: mask_from_segments(packed(lengths)[None], causal=causal),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("source", list(MASKS))
def test_attention_over_a_packed_row_equals_each_document_alone(source: str, causal: bool) -> None:
    lengths = [5, 1, 9, 2, 17]
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, sum(lengths), 8, dtype=torch.float64)
    out = scaled_dot_product_attention(q, k, v, attn_mask=MASKS[source](lengths, causal)[:, None])
    for part in slices(lengths):
        alone = scaled_dot_product_attention(
            q[:, :, part], k[:, :, part], v[:, :, part], is_causal=causal and part.stop - part.start > 1
        )
        torch.testing.assert_close(out[:, :, part], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_padding_changes_no_token_and_makes_no_nan_even_in_gradients(causal: bool) -> None:
    lengths = [5, 3]
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 12, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    segments = torch.stack([packed(lengths, padding=4), packed([], padding=12)])
    mask = mask_from_segments(segments, causal=causal)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
    assert torch.isfinite(out).all()
    out.square().sum().backward()
    assert all(torch.isfinite(part.grad).all() for part in (q, k, v) if part.grad is not None)
    whole = mask_from_segments(packed(lengths)[None], causal=causal)
    unpadded = scaled_dot_product_attention(
        q[:1, :, :8], k[:1, :, :8], v[:1, :, :8], attn_mask=whole[:, None]
    )
    torch.testing.assert_close(out[:1, :, :8], unpadded, rtol=1e-12, atol=1e-12)


class Tiny(nn.Module):
    """One block of a transformer, with positions that restart at each document."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 16), nn.Embedding(32, 16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm_1, self.norm_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.head = nn.Linear(16, 11)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        logits: Tensor = self.head(x + self.mlp(self.norm_2(x)))
        return logits


def test_a_transformer_gives_the_same_logits_for_a_document_packed_or_alone() -> None:
    torch.manual_seed(0)
    model = Tiny().double()
    lengths, padding = [6, 1, 10, 4], 3
    tokens = torch.randint(3, 11, (1, sum(lengths) + padding))
    for part in slices(lengths):
        tokens[0, part.stop - 1] = EDGE
    positions = torch.cat([torch.arange(length) for length in [*lengths, padding]])[None]
    by_tokens = model(tokens, positions, attention_mask(tokens, eos_id=EDGE))
    by_segments = model(tokens, positions, mask_from_segments(packed(lengths, padding)[None]))
    for part in slices(lengths):
        length = part.stop - part.start
        causal = torch.ones(1, length, length, dtype=torch.bool).tril()
        alone = model(tokens[:, part], positions[:, part], causal)
        torch.testing.assert_close(by_tokens[:, part], alone, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(by_segments[:, part], alone, rtol=1e-12, atol=1e-12)
    assert torch.isfinite(by_segments).all()
    blurred = model(tokens, positions, torch.ones_like(attention_mask(tokens, eos_id=EDGE)).tril())
    assert not torch.allclose(blurred, by_tokens), "without the documents' edges the logits differ"


@unfused
@pytest.mark.parametrize(
    ("block_size", "padding", "causal"), [(128, 0, True), (128, 57, False), (16, 57, True)]
)
def test_flex_attention_agrees_with_the_dense_mask(block_size: int, padding: int, causal: bool) -> None:
    torch.manual_seed(0)
    segments = torch.stack([packed([90, 3, 163], padding), packed([256], padding)])
    q, k, v = torch.randn(3, 2, 2, segments.shape[1], 16, dtype=torch.float64)
    blocks = block_mask(segments, causal=causal, block_size=block_size)
    out = flex_attention(q, k, v, block_mask=blocks)
    mask = mask_from_segments(segments, causal=causal)
    dense = scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
    torch.testing.assert_close(out, dense, rtol=1e-12, atol=1e-12)
    assert blocks.kv_num_blocks.device == segments.device


def test_a_block_mask_skips_blocks_that_hold_no_common_document() -> None:
    blocks = block_mask(packed([128, 128, 128, 128])[None]).to_dense()[0, 0]
    assert torch.equal(blocks, torch.eye(4, dtype=blocks.dtype))


@unfused
def test_one_row_of_segments_holds_for_a_whole_batch_in_flex_attention() -> None:
    torch.manual_seed(0)
    segments = packed([70, 60], padding=10)
    q, k, v = torch.randn(3, 3, 2, 140, 16, dtype=torch.float64)
    out = flex_attention(q, k, v, block_mask=block_mask(segments))
    dense = scaled_dot_product_attention(q, k, v, attn_mask=mask_from_segments(segments))
    torch.testing.assert_close(out, dense, rtol=1e-12, atol=1e-12)


@unfused
def test_the_mask_mod_composes_with_a_sliding_window() -> None:
    def window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query - key < 4

    torch.manual_seed(0)
    segments = packed([20, 11], padding=5)[None]
    both = and_masks(mask_mod_from_segments(segments), window)
    q, k, v = torch.randn(3, 1, 2, 36, 16, dtype=torch.float64)
    out = flex_attention(q, k, v, block_mask=create_block_mask(both, 1, None, 36, 36, device="cpu"))
    near = torch.ones(36, 36, dtype=torch.bool).triu(-3)
    dense = scaled_dot_product_attention(q, k, v, attn_mask=(mask_from_segments(segments) & near)[:, None])
    torch.testing.assert_close(out, dense, rtol=1e-12, atol=1e-12)


@unfused
def test_a_block_mask_stays_right_when_the_loader_fills_its_buffer_anew() -> None:
    torch.manual_seed(0)
    segments = packed([20, 11], padding=5)[None]
    q, k, v = torch.randn(3, 1, 2, 36, 16, dtype=torch.float64)
    blocks = block_mask(segments)
    before = flex_attention(q, k, v, block_mask=blocks)
    segments.fill_(1)
    assert torch.equal(flex_attention(q, k, v, block_mask=blocks), before)


@pytest.mark.filterwarnings(
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
)
@pytest.mark.usefixtures("nothing_compiled")
def test_a_compiled_block_mask_is_the_same_and_compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    after_each = []
    for lengths in ([100, 156], [30, 226], [256]):
        segments = packed(lengths)[None]
        compiled, plain = block_mask(segments, compile=True), block_mask(segments)
        assert torch.equal(compiled.to_dense(), plain.to_dense())
        after_each.append(len(graphs))
    assert after_each[0] > 0
    assert after_each == after_each[:1] * 3


def test_masks_compile_whole() -> None:
    tokens = torch.tensor([[7, 2, 5, 6, 2, 9]])
    by_tokens = torch.compile(attention_mask, fullgraph=True, backend="eager")
    assert torch.equal(by_tokens(tokens, eos_id=2), attention_mask(tokens, eos_id=2))
    assert torch.equal(by_tokens(tokens, bos_id=2), attention_mask(tokens, bos_id=2))
    segments = packed([3, 2], padding=1)[None]
    by_segments = torch.compile(mask_from_segments, fullgraph=True, backend="eager")
    assert torch.equal(by_segments(segments), mask_from_segments(segments))


@pytest.mark.parametrize("shape", [(6,), (2, 6)])
def test_masks_are_made_on_the_device_of_the_tokens_without_reading_them(shape: tuple[int, ...]) -> None:
    # The meta device has shapes and no data: whatever needs a value on the host raises.
    numbers = torch.zeros(shape, dtype=torch.int64, device="meta")
    for made in (
        attention_mask(numbers, eos_id=2),
        attention_mask(numbers, bos_id=2, causal=False),
        mask_from_segments(numbers),
    ):
        assert (made.device.type, made.dtype, made.shape) == ("meta", torch.bool, (*shape, 6))


TOKENS = torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize(
    ("tokens", "ids", "message"),
    [
        (TOKENS, {}, "eos_id=None, bos_id=None: give exactly one"),
        (TOKENS, {"eos_id": 1, "bos_id": 2}, "eos_id=1, bos_id=2: give exactly one"),
        (TOKENS, {"eos_id": -1}, "eos_id=-1: must be one token id, 0 or more"),
        (TOKENS, {"bos_id": [1, 2]}, r"bos_id=\[1, 2\]: must be one token id"),
        (TOKENS, {"eos_id": True}, "eos_id=True: must be one token id"),
        (TOKENS.float(), {"eos_id": 2}, "tokens.dtype=torch.float32: must be whole numbers"),
        (TOKENS.bool(), {"eos_id": 2}, "tokens.dtype=torch.bool: must be whole numbers"),
        (TOKENS[None], {"eos_id": 2}, r"tokens.shape=\(1, 1, 3\): must be \(T,\) or \(B, T\)"),
        (TOKENS[0, 0], {"eos_id": 2}, r"tokens.shape=\(\): must be"),
        (TOKENS.numpy(), {"eos_id": 2}, "tokens is a ndarray: must be a torch.Tensor"),
    ],
)
def test_tokens_that_have_no_mask_are_refused(tokens: Any, ids: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        attention_mask(tokens, **ids)


@pytest.mark.parametrize("make", [mask_from_segments, mask_mod_from_segments, block_mask])
def test_segments_that_have_no_mask_are_refused(make: Callable[[Tensor], Any]) -> None:
    with pytest.raises(SettingsError, match="segment_ids.dtype=torch.float32"):
        make(TOKENS.float())
    with pytest.raises(SettingsError, match=r"segment_ids.shape=\(1, 1, 3\)"):
        make(TOKENS[None])


def test_a_block_mask_needs_a_token_and_a_block_size() -> None:
    for nothing in (TOKENS[:, :0], TOKENS[:0]):
        with pytest.raises(SettingsError, match=r"segment_ids.shape=.*: must have at least one token"):
            block_mask(nothing)
    with pytest.raises(SettingsError, match="block_size=0: must be at least 1"):
        block_mask(TOKENS, block_size=0)


@pytest.mark.parametrize("version", ["2.4.1", "2.5.1+cu124"])
def test_a_pytorch_without_flex_attention_is_named_with_the_way_out(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with pytest.raises(
        MissingExtraError, match=rf"torch=={re.escape(version)}: .* install torch>=2.6, or use"
    ):
        block_mask(TOKENS)


def test_multihead_attention_takes_the_opposite() -> None:
    """As the documentation says it."""
    tokens, heads = torch.tensor([[7, 2, 5, 6, 2, 9], [1, 1, 2, 4, 4, 2]]), 2
    mask = attention_mask(tokens, eos_id=2)
    attention = torch.nn.MultiheadAttention(8, heads, batch_first=True)
    x = torch.randn(2, 6, 8)
    found, _ = attention(x, x, x, attn_mask=(~mask).repeat_interleave(heads, dim=0))
    weights = zip(attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True)
    query, key, value = (
        torch.nn.functional.linear(x, weight, bias).view(2, 6, heads, 4).transpose(1, 2)
        for weight, bias in weights
    )
    attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])
    wanted = attention.out_proj(attended.transpose(1, 2).reshape(2, 6, 8))
    assert torch.allclose(found, wanted, atol=1e-5)
