"""Attention masks that keep the documents of a packed row apart.

A row holds three documents, each closed by EOS (2). Its segments and its block-causal mask are

    tokens    7 2 | 5 6 2 | 9                      7 2 5 6 2 9    may attend to
    segments  1 1 | 2 2 2 | 3                  7   x . . . . .
                                               2   x x . . . .
                                               5   . . x . . .
                                               6   . . x x . .
                                               2   . . x x x .
                                               9   . . . . . x

so that every document comes out as if it stood alone, if its positions restart too. The dense masks are
boolean, True where a query (row) may attend to a key (column): what `scaled_dot_product_attention` takes, once
the heads have an axis.

    mask = mask_from_segments(batch.segment_ids)                       # (B, T, T)
    scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])     # q, k, v are (B, heads, T, width)

They are made by tensor operations on the device of their input: nothing is copied to the host, nothing waits
for the device, and `torch.compile` takes them whole. A dense mask has B * T * T bytes; for long rows `block_mask`
gives FlexAttention the same mask by blocks.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.errors import MissingExtraError, SettingsError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""What FlexAttention asks for: (batch, head, query, key) -> may the query attend to the key?"""

_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def attention_mask(
    tokens: Tensor, *, eos_id: int | None = None, bos_id: int | None = None, causal: bool = True
) -> Tensor:
    """The mask of tokens (B, T) -> (B, T, T), or (T,) -> (T, T), by `segments_from_tokens`.

    Without `causal` a document sees all of itself, as in an encoder. Padding cannot be told from tokens: if rows
    are padded, prefer `mask_from_segments`.

    True means that a query may attend to a key, as `scaled_dot_product_attention` has it. `torch.nn.MultiheadAttention`
    means the opposite: give it `attn_mask=(~mask).repeat_interleave(heads, dim=0)`.
    """
    return mask_from_segments(segments_from_tokens(tokens, eos_id=eos_id, bos_id=bos_id), causal=causal)


def mask_from_segments(segment_ids: Tensor, *, causal: bool = True) -> Tensor:
    """The mask of segment ids (B, T) -> (B, T, T), or (T,) -> (T, T): 0 is padding, documents are 1, 2, ...

    Padding is a segment like any other: padding attends to padding, tokens never do, nor padding to tokens. It may
    not attend to nothing, because the softmax of an empty row is NaN in older releases and in some kernels, and the
    loss and the gradients of all weights would follow.
    """
    segments = _integers("segment_ids", segment_ids)
    mask = segments.unsqueeze(-1) == segments.unsqueeze(-2)
    if causal:
        place = torch.arange(segments.shape[-1], device=segments.device)
        mask &= place.unsqueeze(-1) >= place
    return mask


def segments_from_tokens(tokens: Tensor, *, eos_id: int | None = None, bos_id: int | None = None) -> Tensor:
    """Number the documents of each row 1, 2, ... as int32, in the shape of the tokens.

    With `eos_id` a document ends after each EOS, which belongs to it; with `bos_id` one begins at each BOS. What
    stands before the first BOS is the end of a document that began in another row: it has the number 1.
    """
    numbers = _integers("tokens", tokens)
    edge = numbers.to(torch.int64) == _edge_id(eos_id, bos_id)  # int8 would take 300 for 44
    edge = edge.to(torch.int32)
    begun = edge.cumsum(-1, dtype=torch.int32)
    if bos_id is None:
        return begun - edge + 1
    return begun - edge[..., :1] + 1


def mask_mod_from_segments(segment_ids: Tensor, causal: bool = True) -> MaskMod:
    """The same mask as a function for FlexAttention, to compose with others by `and_masks` and `or_masks`.

    It keeps a copy of the segment ids, so a loader may fill its buffer again while the mask is in use. Ids of shape
    (T,) hold for every row of a batch.
    """
    segments = _integers("segment_ids", segment_ids).clone()
    rows = segments.dim() == 2

    def same_segment(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if rows:
            return segments[batch, query] == segments[batch, key]
        return segments[query] == segments[key]

    def same_segment_and_not_later(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return same_segment(batch, head, query, key) & (query >= key)

    return same_segment_and_not_later if causal else same_segment


def block_mask(
    segment_ids: Tensor, *, causal: bool = True, block_size: int = 128, compile: bool = False
) -> "BlockMask":
    """The same mask by blocks, for any number of heads: `flex_attention(q, k, v, block_mask=block_mask(ids))`.

    FlexAttention skips the blocks in which no query meets a key of its document. Making a block mask takes B * T * T
    bytes for a moment, unless `compile` fuses it; make it once a batch, not once a layer. Compiled attention wants
    a `block_size` that is a multiple of its kernel's, which the default is. Needs torch>=2.6.
    """
    if not isinstance(block_size, int) or block_size < 1:
        raise SettingsError(f"block_size={block_size!r}: must be at least 1; 128 suits most kernels")
    create_block_mask = _flex_attention().create_block_mask
    mask_mod = mask_mod_from_segments(segment_ids, causal)
    *rows, length = segment_ids.shape
    if not segment_ids.numel():
        raise SettingsError(f"segment_ids.shape={tuple(segment_ids.shape)}: must have at least one token")
    create = torch.compile(create_block_mask) if compile else create_block_mask
    return create(
        mask_mod, rows[0] if rows else None, None, length, length, segment_ids.device, BLOCK_SIZE=block_size
    )


def _flex_attention() -> ModuleType:
    # 2.5 has it on trial: it asks for the segments of places beyond the row, and cannot be compiled.
    if torch.__version__ < "2.6":
        raise MissingExtraError(
            f"torch=={torch.__version__}: FlexAttention is missing or unfinished in it; install torch>=2.6, or use"
            " mask_from_segments"
        )
    return import_module("torch.nn.attention.flex_attention")


def _edge_id(eos_id: int | None, bos_id: int | None) -> int:
    if (eos_id is None) == (bos_id is None):
        raise SettingsError(f"eos_id={eos_id}, bos_id={bos_id}: give exactly one of them")
    name, number = ("bos_id", bos_id) if eos_id is None else ("eos_id", eos_id)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise SettingsError(f"{name}={number!r}: must be one token id, 0 or more")
    return number


def _integers(name: str, values: Tensor) -> Tensor:
    if not isinstance(values, Tensor):
        raise SettingsError(f"{name} is a {type(values).__name__}: must be a torch.Tensor")
    if values.dtype not in _WHOLE + _WIDE_UNSIGNED:
        raise SettingsError(f"{name}.dtype={values.dtype}: must be whole numbers, such as torch.int64")
    if values.dim() not in (1, 2):
        raise SettingsError(f"{name}.shape={tuple(values.shape)}: must be (T,) or (B, T)")
    # PyTorch computes little with the wide unsigned types, and less on accelerators.
    return values.to(torch.int64) if values.dtype in _WIDE_UNSIGNED else values
