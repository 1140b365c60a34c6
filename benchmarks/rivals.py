"""What `build.py` compares a build with; each runs in processes of its own, as `python rivals.py ROLE ...`.

encode      a limit: an encoder alone, on texts already in memory. Loads, says so, waits for a line on
            its standard input so that several start together, encodes, and tells how long each took.
            With `--encoder reading`, the texts are read from the file meanwhile, and nothing else is done.
build       `headrace.build`, from the call to the manifest.
datasets    Hugging Face: `load_dataset`, `map` with the tokenizers library, then one uint16 memmap of all
            tokens, as nanoGPT's `prepare.py` does.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BATCH_BYTES = 4 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("encode", "build", "datasets"))
    parser.add_argument("corpus", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--encoder", choices=("interface", "plain", "huggingface", "reading"))
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help="which of how many parts")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write-batches", type=int, default=1024, help="pieces in which nanoGPT writes")
    options = parser.parse_args()
    report = {"encode": _encode, "build": _build, "datasets": _datasets}[options.role](options)
    print(json.dumps(report), flush=True)


def _encode(options: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    if options.encoder == "reading":
        run = _while_reading(options)
    else:
        texts = _texts(options)
        started = time.perf_counter()
        run = {"interface": _by_interface, "plain": _by_gigatoken, "huggingface": _by_huggingface}[
            options.encoder
        ](options.tokenizer, texts)
    loaded = time.perf_counter()
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.readline()
    started_encoding, cpu_before = time.perf_counter(), _cpu_seconds()
    tokens = run()
    return {
        "tokens": tokens,
        "load_seconds": loaded - started,
        "encode_seconds": time.perf_counter() - started_encoding,
        "cpu_seconds": _cpu_seconds() - cpu_before,
    }


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended: what others on the machine do hardly changes it."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _texts(options: argparse.Namespace) -> list[bytes]:
    """This process's share of the corpus, in memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    which, count = options.share
    file = pq.ParquetFile(options.corpus)
    texts: list[bytes] = []
    for group in range(which, file.num_row_groups, count):
        texts.extend(file.read_row_group(group).column(0).cast(pa.binary()).to_pylist())
    return texts


def _batches(texts: list[bytes]) -> list[list[bytes]]:
    batches: list[list[bytes]] = [[]]
    size = 0
    for text in texts:
        if size >= BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(text)
        size += len(text)
    return batches


def _by_interface(tokenizer: Path, texts: list[bytes]) -> Callable[[], int]:
    from headrace.tokenizers.encoders import GigatokenEncoder
    from headrace.tokenizers.find import find_tokenizer
    from headrace.tokenizers.parity import as_texts

    encoder = GigatokenEncoder(find_tokenizer(tokenizer))
    encoder.encode(as_texts([b"The first call loads what is left to load."]))
    batches = [as_texts(batch) for batch in _batches(texts)]
    return lambda: sum(len(encoder.encode(batch).values) for batch in batches)


def _by_gigatoken(tokenizer: Path, texts: list[bytes]) -> Callable[[], int]:
    import gigatoken

    loaded = gigatoken.Tokenizer.from_json(tokenizer.read_text())
    loaded.encode_batch([b"The first call loads what is left to load."], parallel=False)
    batches = _batches(texts)
    return lambda: sum(len(loaded.encode_batch(batch, parallel=False).layout.content) for batch in batches)


def _while_reading(options: argparse.Namespace) -> Callable[[], int]:
    """The least that any build could do: decode the file, and encode what comes, without a copy in between."""
    import gigatoken

    loaded = gigatoken.Tokenizer.from_json(options.tokenizer.read_text())
    loaded.encode_batch([b"The first call loads what is left to load."], parallel=False)
    read = _texts_of_parquet if options.corpus.suffix == ".parquet" else _texts_of_json_lines
    return lambda: sum(
        len(loaded.encode_batch(batch, parallel=False).layout.content)
        for batch in read(options.corpus, *options.share)
    )


def _texts_of_parquet(corpus: Path, which: int, count: int) -> Iterator[Any]:
    import awkward as ak
    import numpy as np
    import pyarrow.parquet as pq

    file = pq.ParquetFile(corpus, memory_map=True)
    for group in range(which, file.num_row_groups, count):
        for chunk in file.read_row_group(group, use_threads=False).column(0).chunks:
            _, offsets, data = chunk.buffers()
            ends = np.frombuffer(offsets, dtype=np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
            characters = np.frombuffer(data, dtype=np.uint8)
            content = ak.contents.NumpyArray(characters, parameters={"__array__": "char"})
            index = ak.index.Index64(ends.astype(np.int64))
            yield ak.Array(ak.contents.ListOffsetArray(index, content, parameters={"__array__": "string"}))


def _texts_of_json_lines(corpus: Path, which: int, count: int) -> Iterator[list[str]]:
    import msgspec

    class Line(msgspec.Struct):
        text: str

    decode = msgspec.json.Decoder(Line).decode_lines
    size = corpus.stat().st_size
    start, stop = size * which // count, size * (which + 1) // count
    with open(corpus, "rb") as file:
        if start:
            # The line that begins before the share belongs to the share before.
            file.seek(start - 1)
            file.readline()
        while file.tell() < stop:
            block = file.read(min(BATCH_BYTES, stop - file.tell())) + file.readline()
            yield [line.text for line in decode(block)]


def _by_huggingface(tokenizer: Path, texts: list[bytes]) -> Callable[[], int]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import tokenizers

    loaded = tokenizers.Tokenizer.from_file(str(tokenizer))
    batches = [[text.decode() for text in batch] for batch in _batches(texts)]
    return lambda: sum(
        len(e.ids) for batch in batches for e in loaded.encode_batch(batch, add_special_tokens=False)
    )


def _build(options: argparse.Namespace) -> dict[str, Any]:
    import headrace

    started, cpu_before = time.perf_counter(), _cpu_seconds()
    report = headrace.build(
        options.corpus, options.out, tokenizer=options.tokenizer, text_field="text", workers=options.workers
    )
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": _cpu_seconds() - cpu_before,
        "tokens": report.tokens,
        "documents": report.records,
        "encoder": report.encoder,
        "shards": report.shards,
        "built_tasks": report.built,
        "reused_tasks": report.reused,
    }


def _datasets(options: argparse.Namespace) -> dict[str, Any]:
    os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HOME": str(options.out), "TOKENIZERS_PARALLELISM": "false"}
    import datasets
    import numpy as np
    import tokenizers

    datasets.disable_caching()
    datasets.disable_progress_bars()
    tokenizer = tokenizers.Tokenizer.from_file(str(options.tokenizer))
    end = tokenizer.token_to_id("<|endoftext|>")

    def process(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        ids = [[*e.ids, end] for e in tokenizer.encode_batch(batch["text"], add_special_tokens=False)]
        return {"ids": ids, "len": [len(one) for one in ids]}

    started, cpu_before = time.perf_counter(), _cpu_seconds()
    cache = str(options.out / "cache")
    loaded = datasets.load_dataset("parquet", data_files=str(options.corpus), split="train", cache_dir=cache)
    after_load = time.perf_counter()
    mapped = loaded.map(process, batched=True, remove_columns=["text"], num_proc=options.workers)
    after_map = time.perf_counter()
    total = int(np.sum(mapped["len"], dtype=np.uint64))
    out = np.memmap(options.out / "train.bin", dtype=np.uint16, mode="w+", shape=(total,))
    place, parts = 0, min(options.write_batches, len(mapped))
    for number in range(parts):
        part = mapped.shard(num_shards=parts, index=number, contiguous=True).with_format("numpy")
        tokens = np.concatenate(list(part["ids"]))
        out[place : place + len(tokens)] = tokens
        place += len(tokens)
    out.flush()
    done = time.perf_counter()
    return {
        "seconds": done - started,
        "cpu_seconds": _cpu_seconds() - cpu_before,
        "load_seconds": after_load - started,
        "map_seconds": after_map - after_load,
        "write_seconds": done - after_map,
        "tokens": total,
    }


if __name__ == "__main__":
    main()
