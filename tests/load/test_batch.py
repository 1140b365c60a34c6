"""A batch as a mapping, as attributes, and in the forms that trainers expect."""

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.errors import FieldError, SettingsError
from headrace.load.batch import Batch, BatchInfo

INFO = BatchInfo(step=2, position=8, rows=2)


def small() -> Batch:
    return Batch({"x": np.arange(6).reshape(2, 3), "y": np.array([1.5, 2.5]), "most": 3}, INFO)


# A mapping


def test_a_batch_is_a_mapping() -> None:
    batch = small()
    assert isinstance(batch, Mapping)
    assert list(batch) == list(batch.keys()) == ["x", "y", "most"]
    assert len(batch) == 3
    assert "x" in batch
    assert "z" not in batch
    assert batch["most"] == 3
    assert batch.get("z") is None
    assert batch.get("z", 7) == 7
    assert [name for name, _ in batch.items()] == list(batch)
    assert dict(batch)["y"] is batch["y"]


def test_fields_are_attributes_and_keyword_arguments() -> None:
    batch = small()
    assert batch.x is batch["x"]

    def model(x: Any, y: Any, most: int) -> tuple[Any, Any, int]:
        return x, y, most

    assert model(**batch)[0] is batch.x


def test_the_place_in_the_stream_comes_along() -> None:
    batch = small()
    assert (batch.info.step, batch.info.position, batch.info.rows) == (2, 8, 2)
    assert batch.replace({"x": 1}).info == batch.info
    assert dict(batch.replace({"x": 1})) == {"x": 1}


def test_a_field_that_is_missing_is_named_with_those_there_are() -> None:
    batch = small()
    with pytest.raises(FieldError, match=r"no 'labels'; it has x, y, most") as caught:
        batch["labels"]
    assert isinstance(caught.value, KeyError)
    with pytest.raises(AttributeError, match=r"no 'labels'; it has x, y, most"):
        _ = batch.labels
    assert not hasattr(batch, "labels")
    assert not hasattr(batch, "_private")


def test_a_batch_shows_its_fields_types_and_shapes() -> None:
    assert repr(small()) == "Batch(x: int64[2, 3], y: float64[2], most: 3)"
    torch = pytest.importorskip("torch", reason="needs torch")
    assert repr(Batch({"x": torch.zeros(2, dtype=torch.int32), "names": ["a"]}, INFO)) == (
        "Batch(x: int32[2], names: list)"
    )


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_batch_can_be_sent_to_another_process(protocol: int) -> None:
    batch = small()
    other = pickle.loads(pickle.dumps(batch, protocol))
    assert type(other) is Batch
    assert other.info == batch.info
    assert list(other) == list(batch)
    assert other.x.tolist() == batch.x.tolist()


def test_a_batch_can_be_copied() -> None:
    batch = small()
    assert copy.copy(batch).x is batch.x
    deep = copy.deepcopy(batch)
    assert deep.x.tolist() == batch.x.tolist()
    assert not np.shares_memory(deep.x, batch.x)


def test_only_tensors_move() -> None:
    with pytest.raises(SettingsError, match=r"to\('cuda'\): this batch holds NumPy arrays"):
        small().to("cuda")
    torch = pytest.importorskip("torch", reason="needs torch")
    batch = Batch({"x": torch.zeros(2), "most": 3}, INFO)
    moved = batch.to("meta", non_blocking=True)
    assert moved.x.device.type == "meta"
    assert moved.most == 3
    assert moved.info == INFO


# What trainers expect: documents 1 2 3, 4 5, 6 7 8 9 in rows of six, the second row with two places of padding

TOKENS = [[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 0, 0]]
SEGMENTS = [[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 0, 0]]
POSITIONS = [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1]]
SHIFTED = [[2, 3, -100, 5, -100, -100], [7, 8, 9, -100, -100, -100]]
UNSHIFTED = [[-100, 2, 3, -100, 5, -100], [-100, 7, 8, 9, -100, -100]]
BOUNDS = [0, 3, 5, 6, 10, 12]


def tokens_batch(labels: str = "shifted", without: tuple[str, ...] = (), **changes: Any) -> Batch:
    chosen = SHIFTED if labels == "shifted" else UNSHIFTED
    arrays: dict[str, Any] = {
        "tokens": np.array(TOKENS, dtype=np.int64),
        "labels": np.array(chosen, dtype=np.int64),
        "position_ids": np.array(POSITIONS, dtype=np.int64),
        "segment_ids": np.array(SEGMENTS, dtype=np.int32),
        "cu_seqlens": np.array(BOUNDS, dtype=np.int32),
        "max_seqlen": 4,
        "loss_mask": np.array(chosen) != -100,
    }
    kept = {name: value for name, value in arrays.items() if name not in without}
    return Batch(kept | changes, BatchInfo(0, 0, 2, labels, -100))


def flat(rows: list[list[int]]) -> list[int]:
    return [value for row in rows for value in row]


HUGGING_FACE = {
    "input_ids": [flat(TOKENS)],
    "labels": [flat(UNSHIFTED)],
    "position_ids": [flat(POSITIONS)],
    "seq_idx": [[0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 4, 4]],
    "cu_seq_lens_q": BOUNDS,
    "cu_seq_lens_k": BOUNDS,
    "max_length_q": 4,
    "max_length_k": 4,
}
DTYPES = {
    "input_ids": "int64",
    "labels": "int64",
    "position_ids": "int64",
    "seq_idx": "int32",
    "cu_seq_lens_q": "int32",
    "cu_seq_lens_k": "int32",
}


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in values.items()}


def dtypes(values: Mapping[str, Any]) -> dict[str, str]:
    return {n: str(v.dtype).rpartition(".")[2] for n, v in values.items() if hasattr(v, "dtype")}


@pytest.mark.parametrize("labels", ["shifted", "unshifted"])
def test_hugging_face_gets_one_row_with_unshifted_labels_and_boundaries(labels: str) -> None:
    given = tokens_batch(labels).as_huggingface()
    assert plain(given) == HUGGING_FACE
    assert dtypes(given) == DTYPES
    assert "attention_mask" not in given
    assert type(given["max_length_q"]) is int


@pytest.mark.parametrize("labels", ["shifted", "unshifted"])
def test_tensors_stay_tensors_for_hugging_face(labels: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    batch = tokens_batch(labels)
    tensors = {n: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for n, v in batch.items()}
    given = batch.replace(tensors).as_huggingface()
    assert plain(given) == HUGGING_FACE
    assert dtypes(given) == DTYPES
    assert all(torch.is_tensor(given[name]) for name in DTYPES)


@pytest.mark.parametrize(
    ("labels", "without"),
    [
        ("shifted", ()),
        ("shifted", ("labels", "loss_mask")),
        ("unshifted", ("loss_mask",)),
        ("unshifted", ("labels", "loss_mask")),
    ],
)
def test_labels_for_hugging_face_need_only_what_they_are_made_of(
    labels: str, without: tuple[str, ...]
) -> None:
    assert plain(tokens_batch(labels, without).as_huggingface()) == HUGGING_FACE


def test_hugging_face_labels_of_another_ignore_index_and_dtype() -> None:
    batch = tokens_batch(tokens=np.array(TOKENS, dtype=np.int32))
    other = Batch(dict(batch), BatchInfo(0, 0, 2, "shifted", -1)).as_huggingface()
    assert other["labels"].tolist() == [[-1 if label == -100 else label for label in flat(UNSHIFTED)]]
    assert other["labels"].dtype == np.int32


def test_flash_attention_gets_everything_flat() -> None:
    given = tokens_batch().as_flash_attention()
    assert plain(given) == {
        "tokens": flat(TOKENS),
        "labels": flat(SHIFTED),
        "position_ids": flat(POSITIONS),
        "loss_mask": [label != -100 for label in flat(SHIFTED)],
        "cu_seqlens_q": BOUNDS,
        "cu_seqlens_k": BOUNDS,
        "max_seqlen_q": 4,
        "max_seqlen_k": 4,
    }
    assert given["cu_seqlens_q"].dtype == np.int32
    assert np.shares_memory(given["tokens"], given["tokens"].base)
    fewer = tokens_batch(without=("labels", "loss_mask", "position_ids", "segment_ids")).as_flash_attention()
    assert list(fewer) == ["tokens", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]


def test_megatron_gets_shifted_labels_and_a_mask_of_floats() -> None:
    given = tokens_batch().as_megatron()
    assert plain(given) == {
        "tokens": TOKENS,
        "labels": SHIFTED,
        "position_ids": POSITIONS,
        "cu_seqlens": BOUNDS,
        "max_seqlen": 4,
        "loss_mask": [[float(label != -100) for label in row] for row in SHIFTED],
    }
    assert given["loss_mask"].dtype == np.float32
    torch = pytest.importorskip("torch", reason="needs torch")
    batch = tokens_batch()
    tensors = {n: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for n, v in batch.items()}
    assert batch.replace(tensors).as_megatron()["loss_mask"].dtype == torch.float32


def test_megatron_refuses_labels_that_are_not_shifted() -> None:
    with pytest.raises(SettingsError, match=r"as_megatron\(\): needs labels='shifted'"):
        tokens_batch("unshifted").as_megatron()


@pytest.mark.parametrize(
    ("form", "missing"),
    [
        ("as_huggingface", "tokens"),
        ("as_huggingface", "position_ids"),
        ("as_huggingface", "cu_seqlens"),
        ("as_huggingface", "max_seqlen"),
        ("as_huggingface", "segment_ids"),
        ("as_flash_attention", "cu_seqlens"),
        ("as_flash_attention", "max_seqlen"),
        ("as_megatron", "tokens"),
        ("as_megatron", "labels"),
        ("as_megatron", "loss_mask"),
        ("as_megatron", "cu_seqlens"),
    ],
)
def test_a_form_names_the_field_that_it_lacks(form: str, missing: str) -> None:
    with pytest.raises(FieldError, match=f"no '{missing}'; it has "):
        getattr(tokens_batch(without=(missing,)), form)()


@pytest.mark.parametrize("form", ["as_huggingface", "as_flash_attention"])
def test_flat_forms_need_the_boundaries_of_the_whole_batch(form: str) -> None:
    batch = tokens_batch(cu_seqlens=np.array([[0, 3, 5, 6], [0, 4, 6, 6]], dtype=np.int32))
    with pytest.raises(SettingsError, match="needs cu_seqlens='batch'"):
        getattr(batch, form)()


@pytest.mark.parametrize("labels", ["shifted", "unshifted"])
def test_a_loader_gives_batches_that_take_these_forms(labels: str) -> None:
    documents = [np.array(each, dtype=np.uint16) for each in ([1, 2, 3], [4, 5], [6, 7, 8, 9])]
    loader = headrace.Loader(
        headrace.from_arrays({"tokens": documents}),
        seq_len=6,
        batch_size=2,
        shuffle=False,
        drop_last=False,
        labels=labels,
    )
    (batch,) = loader
    given = batch.as_huggingface()
    held = {}
    for begin, end in zip(given["cu_seq_lens_q"].tolist(), given["cu_seq_lens_q"].tolist()[1:], strict=False):
        tokens = tuple(given["input_ids"][0, begin:end].tolist())
        held[tokens] = given["labels"][0, begin:end].tolist()
    for document in documents:
        assert held.pop(tuple(document.tolist())) == [-100, *document[1:].tolist()]
    assert all(set(label) == {-100} for label in held.values()), "what is left is padding"
    assert given["max_length_q"] == 4
    assert batch.info.labels == labels
