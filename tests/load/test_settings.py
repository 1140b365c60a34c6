"""Settings that cannot work are refused at once, with the argument, its value and what to do."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.errors import FieldError, HeadraceError, SettingsError
from headrace.load.loader import Loader
from headrace.load.settings import LoaderSettings
from headrace.load.world import WorldOptions
from tests.load import streams

DATA = streams.token_dataset([n % 13 + 1 for n in range(60)])
TOKENS = sum(n % 13 + 1 for n in range(60))


def _refused(said: str, data: Any = DATA, **options: Any) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        Loader(data, **{"batch_size": 2, "seq_len": 8, **options})
    message = str(caught.value)
    assert len(message) < 500
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("seq_len", 0, "must be at least 2"),
        ("seq_len", 1, "must be at least 2"),
        ("seq_len", -8, "must be at least 2"),
        ("seq_len", True, "must be a whole number or None"),
        ("seq_len", "a", "must be a whole number or None"),
        ("seq_len", 8.0, "must be a whole number or None"),
        ("batch_size", 0, "must be at least 1"),
        ("batch_size", -1, "must be at least 1"),
        ("batch_size", None, "must be a whole number"),
        ("batch_size", 2.0, "must be a whole number"),
        ("batch_size", False, "must be a whole number"),
        ("epochs", 0, "must be at least 1"),
        ("epochs", 1.5, "must be a whole number or None"),
        ("prefetch", -1, "must be at least 0"),
        ("prefetch", "all", "must be a whole number or None"),
        ("workers", 0, "must be at least 1"),
        ("seed", -1, "must be at least 0"),
        ("seed", 2**64, r"must be 0 to 2\^64 - 1"),
        ("seed", None, "must be a whole number"),
        ("timeout_seconds", 0, "must be a number of seconds above 0"),
        ("timeout_seconds", float("nan"), "must be a number of seconds above 0"),
        ("timeout_seconds", float("inf"), "must be a number of seconds above 0"),
        ("timeout_seconds", "60", "must be a number of seconds above 0"),
        ("group_shards", 0, "must be at least 1"),
        ("max_documents", 0, "must be at least 1"),
        ("pad_id", -1, "must be at least 0"),
        ("pad_id", "<pad>", "must be a whole number"),
        ("ignore_index", None, "must be a whole number"),
        ("drop_last", 1, "must be True or False"),
        ("drop_last", None, "must be True or False"),
        ("align_documents", "yes", "must be True or False"),
        ("boundaries", 0, "must be True or False"),
        ("packing", "bestfit", "must be one of 'best-fit', 'windows', 'pad'"),
        ("packing", None, "must be one of"),
        ("overlong", "cut", "must be one of 'split', 'truncate', 'drop'"),
        ("labels", "next", "must be one of 'shifted', 'unshifted'"),
        ("cu_seqlens", "rows", "must be one of 'batch', 'row'"),
        ("shuffle", "blocks", "must be True, False, one of global, block, units, none"),
        ("shuffle", 5, "must be True, False"),
        ("dtype", "int16", "must be 'int64' or 'int32'"),
        ("dtype", "float32", "must be 'int64' or 'int32'"),
        ("dtype", object(), "must be 'int64' or 'int32'"),
        ("fields", ["token"], "must be some of tokens, labels, position_ids"),
        ("fields", [], "must be some of tokens"),
        (
            "token_field",
            "text",
            "there is no such field; tokens are in a field such as .* The fields are tokens",
        ),
    ],
)
def test_a_value_that_cannot_work_is_named_with_what_would(name: str, value: Any, said: str) -> None:
    _refused(rf"(?s)^{name}=.*{said}", **{name: value})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "int32", "pad_id": 2**31}, "pad_id=2147483648"),
        ({"dtype": "int64", "pad_id": 2**63}, "pad_id=9223372036854775808"),
        ({"dtype": "int32", "ignore_index": -(2**31) - 1}, "ignore_index=-2147483649"),
        ({"ignore_index": 2**70}, "ignore_index=1180591620717411303424"),
    ],
)
def test_numbers_that_the_batch_cannot_hold_are_refused(options: dict[str, Any], said: str) -> None:
    _refused(said, **options)


def test_choices_are_shown_as_they_were_given() -> None:
    _refused("packing='bestfit'", packing="bestfit")
    _refused("timeout_seconds='60'", timeout_seconds="60")


def test_more_tokens_a_row_than_there_are_is_refused() -> None:
    _refused(
        rf"seq_len={TOKENS + 1}: the dataset has only {TOKENS} tokens, too few for one row",
        seq_len=TOKENS + 1,
        packing="windows",
    )
    Loader(DATA, batch_size=1, seq_len=TOKENS, packing="windows")


def test_fewer_tokens_than_a_row_has_are_padded() -> None:
    (batch,) = Loader(DATA, batch_size=1, seq_len=TOKENS + 3)
    assert (batch.segment_ids[0] > 0).sum() == TOKENS


def test_a_batch_of_more_rows_than_there_are_is_refused_with_what_helps() -> None:
    rows = Loader(DATA, batch_size=1, seq_len=8).rows_per_epoch
    _refused(
        rf"batch_size={rows + 1} needs {rows + 1} rows, but there are {rows}.*"
        "smaller batch_size, more epochs, or drop_last=False",
        batch_size=rows + 1,
    )
    _refused(rf"batch_size={rows} on 2 ranks needs {2 * rows} rows", batch_size=rows, rank=0, world_size=2)
    for helps in ({"epochs": 2}, {"epochs": None}, {"drop_last": False}):
        assert next(iter(Loader(DATA, batch_size=rows + 1, seq_len=8, **helps)))


def test_an_unknown_setting_is_told_the_nearest_one() -> None:
    _refused("batchsize: a Loader has no such setting; did you mean batch_size?", batchsize=3)
    _refused("seqlen: .*did you mean seq_len?", seqlen=3)
    _refused("num_workers: .*did you mean workers?", num_workers=3)
    _refused("xyzzy: a Loader has no such setting; the settings are align_documents, batch_size", xyzzy=3)
    _refused("xyzzy: .* mesh, .* rank, .* world_size", xyzzy=3)
    _refused("wordl_size: .*did you mean world_size?", wordl_size=3)
    _refused("cache: a Loader has no such setting; give it to headrace.open", cache="off")
    _refused("cache_bytes: a Loader has no such setting; give it to headrace.open", cache_bytes="1GB")
    _refused("device: a Loader has no such setting; headrace.torch.Loader has it", device="cpu")
    _refused("sharding: a Loader has no such setting; headrace.jax.Loader has it", sharding=None)


def test_a_field_that_holds_no_tokens_is_named_with_its_type() -> None:
    data = headrace.from_arrays({"tokens": [[1, 2]], "label": np.zeros(1, dtype=np.int64)})
    said = r"token_field='label': is of type int64; tokens are in a field such as uint16\[\*\]. .*label \(int64\)"
    with pytest.raises(SettingsError, match=said):
        Loader(data, seq_len=8, batch_size=1, token_field="label")


def test_a_batch_size_is_needed() -> None:
    with pytest.raises(SettingsError, match="batch_size is missing: say how many rows"):
        Loader(DATA, seq_len=8)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"align_documents": True}, "align_documents=True: needs packing='windows'"),
        ({"align_documents": True, "packing": "windows", "boundaries": False}, "align_documents=True: needs"),
        ({"boundaries": False}, "boundaries=False: needs packing='windows'"),
        ({"group_shards": 2, "packing": "windows"}, "group_shards=2: windows need no groups"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(options: dict[str, Any], said: str) -> None:
    _refused(said, **options)


def test_a_fixed_number_of_documents_that_is_too_small_says_how_many_there_are() -> None:
    loader = Loader(DATA, batch_size=4, seq_len=40, max_documents=2, packing="windows")
    with pytest.raises(
        HeadraceError,
        match=r"max_documents=2: a batch has \d+ segments \(documents and padding\); give a larger",
    ):
        list(loader)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "data", [DATA, headrace.mix({"a": (DATA, 1), "b": (DATA, 2)})], ids=["one", "mixture"]
)
@pytest.mark.parametrize("cu_seqlens", ["batch", "row"])
def test_a_fixed_number_of_documents_is_checked_before_training(
    data: Any, shuffle: bool, cu_seqlens: str
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "seq_len": 40, "shuffle": shuffle, "cu_seqlens": cu_seqlens}
    with pytest.raises(SettingsError, match=r"max_documents=2: a (batch|row).* give at least \d+") as caught:
        Loader(data, max_documents=2, **options)
    needed = int(str(caught.value).split()[-1])
    with pytest.raises(SettingsError, match=f"give at least {needed}"):
        Loader(data, max_documents=needed - 1, **options)
    for batch in Loader(data, max_documents=needed, epochs=20, **options):
        assert batch.cu_seqlens.shape[-1] == needed + 1


def test_data_without_tokens_says_how_to_get_some() -> None:
    text = headrace.from_arrays({"text": [b"a document"] * 4})
    with pytest.raises(FieldError, match=r"no field of tokens among 'text' .*--tokenizer bytes.*token_field"):
        Loader(text, batch_size=1, seq_len=4)
    fixed = headrace.from_arrays({"tokens": np.ones((4, 3), dtype=np.int64)})
    with pytest.raises(FieldError, match=r"'tokens' is int64\[3\], but packing needs .* like int64\[\*\]"):
        Loader(fixed, batch_size=1, seq_len=4)


def test_data_that_has_no_tokens_cannot_be_packed() -> None:
    with pytest.raises(FieldError, match="no field of tokens"):
        Loader(headrace.from_arrays({"x": np.arange(4)}), batch_size=1, seq_len=4)
    with pytest.raises(FieldError, match=r"tokens must be whole numbers"):
        Loader(headrace.from_arrays({"tokens": [np.ones(9)]}), batch_size=1, seq_len=4)
    with pytest.raises(FieldError, match=r"tokens must be whole numbers"):
        Loader(headrace.from_arrays({"tokens": [np.ones((9, 2), dtype=np.int64)]}), batch_size=1, seq_len=4)
    _refused("seq_len=8: Numbers is not a Headrace dataset.*leave seq_len out", data=streams.Numbers(9))


def test_a_path_without_a_dataset_says_so(tmp_path: Any) -> None:
    with pytest.raises(HeadraceError, match="nothing"):
        Loader(tmp_path / "nothing", batch_size=1)


def test_a_dataset_of_empty_documents_has_no_rows() -> None:
    empty = headrace.from_arrays({"tokens": [np.empty(0, dtype=np.uint16)] * 3})
    for packing in ("best-fit", "windows", "pad"):
        _refused("too few for one row|no rows", data=empty, packing=packing)
    _refused("no rows", data=streams.token_dataset([20] * 3), overlong="drop")


def test_values_may_be_numpy_numbers_and_types() -> None:
    plain = streams.take(Loader(DATA, batch_size=2, seq_len=8, dtype="int32"))
    for dtype in (np.int32, np.dtype("int32"), "<i4"):
        loader = Loader(DATA, batch_size=np.int64(2), seq_len=np.uint8(8), dtype=dtype)
        assert streams.same(streams.take(loader), plain)


def test_settings_cannot_be_changed_afterwards() -> None:
    loader = Loader(DATA, batch_size=2, seq_len=8)
    with pytest.raises(AttributeError):
        loader.settings.batch_size = 3  # type: ignore[misc]


def test_the_page_lists_every_setting_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "loader.md").read_text()
    tables = page[page.index("## Settings") : page.index("`headrace.torch.Loader` also takes")]
    shown: dict[str, str] = {}
    for names, values in re.findall(r"^\| (`.*?) \| (.*?) \|", tables, re.MULTILINE):
        defaults = values.split(", ")
        for place, name in enumerate(re.findall(r"`(\w+)`", names)):
            shown[name] = defaults[min(place, len(defaults) - 1)].strip('`"')
    ranks = set(WorldOptions.__annotations__)
    assert set(shown) - ranks == {each.name for each in dataclasses.fields(LoaderSettings)}
    assert all(f"`{name}`" in tables for name in ranks)
    for each in dataclasses.fields(LoaderSettings):
        # What a batch is has no default, and that of the shuffle is an object.
        if each.default is not dataclasses.MISSING:
            assert shown[each.name] == str(each.default).removesuffix(".0"), each.name
