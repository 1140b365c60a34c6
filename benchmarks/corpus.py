"""Text to measure with, from what is on the machine: nothing is downloaded and nothing of it is committed.

Paragraphs of Python's standard library and of installed documentation (more of it after `apt-get install
linux-doc-6.1 python3.11-doc`) are drawn into documents whose lengths have a heavy tail, like web pages. The
same paragraphs come up several times, so each document also gets names of its own: encoders cache words, and
real text never stops bringing new ones.
"""

import functools
import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 32_000
ROWS_IN_GROUP = 2000
_SYLLABLES = [
    a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "on", "ist", "ur")
]


def paragraphs(most_bytes: int) -> tuple[list[bytes], dict[str, int]]:
    """Paragraphs of prose and of source code, and how many bytes of each kind there are."""
    prose, sources = _files()
    found: list[bytes] = []
    sizes = {"documentation": 0, "source code": 0}
    for kind, files in (("documentation", prose), ("source code", sources)):
        for path in files:
            pieces = [piece + b"\n\n" for piece in _content(path).split(b"\n\n") if len(piece) > 40]
            found.extend(pieces)
            sizes[kind] += sum(map(len, pieces))
            if sizes[kind] > most_bytes:
                break
    return found, sizes


@functools.cache
def _files() -> tuple[list[Path], list[Path]]:
    """Of prose, and of source code."""
    documents = Path("/usr/share/doc")
    prose = (path for ending in ("rst.gz", "rst.txt", "txt.gz") for path in documents.rglob(f"*.{ending}"))
    return sorted(prose), sorted(_library_sources())


def _library_sources() -> Iterator[Path]:
    """Of Python's standard library. Installed packages lie inside it: tens of thousands of files not to be listed."""
    for folder, inside, files in os.walk(sysconfig.get_path("stdlib")):
        inside[:] = [name for name in inside if name != "site-packages"]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _content(path: Path) -> bytes:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return raw.decode().encode()
    except (OSError, UnicodeDecodeError, EOFError, zlib.error):
        return b""


def documents(pool: list[bytes], total_bytes: int, seed: int = 0) -> Iterator[bytes]:
    """Documents until there are `total_bytes`: median 2 kB, mean 4 kB, the longest about a megabyte."""
    random = np.random.default_rng(seed)
    left = total_bytes
    while left > 0:
        targets = np.clip(random.lognormal(7.6, 1.2, 1024), 50, 2**20).astype(int).tolist()
        starts = random.integers(0, len(pool), 1024).tolist()
        for target, start in zip(targets, starts, strict=True):
            document = _document(pool, target, start, random)
            yield document
            left -= len(document)
            if left <= 0:
                return


def _document(pool: list[bytes], target: int, start: int, random: Any) -> bytes:
    """Paragraphs that stood near each other, in another order, with names that no other document has."""
    size, stop = 0, start
    while size < target:
        size += len(pool[stop % len(pool)])
        stop += 1
    order = (random.permutation(stop - start) + start).tolist()
    pieces = [pool[number % len(pool)] for number in order]
    names = random.integers(0, len(_SYLLABLES), (1 + target // 1500, 4)).tolist()
    for name in names:
        pieces.insert(
            name[0] % (len(pieces) + 1), "".join(_SYLLABLES[part] for part in name).title().encode() + b" "
        )
    text = b"".join(pieces)[:target]
    # The cut may fall inside a character.
    return text.decode(errors="ignore").encode()


def write_corpus(folder: Path, total_bytes: int) -> dict[str, Any]:
    """The same documents as `corpus.parquet` and `corpus.jsonl`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    pool, sizes = paragraphs(total_bytes)
    lengths: list[int] = []
    schema = pa.schema([("text", pa.string())])
    with (
        pq.ParquetWriter(folder / "corpus.parquet", schema) as table,
        open(folder / "corpus.jsonl", "wb") as lines,
    ):
        rows: list[str] = []

        def write() -> None:
            table.write_table(pa.table({"text": rows}, schema=schema))
            lines.write(
                b"".join(json.dumps({"text": row}, ensure_ascii=False).encode() + b"\n" for row in rows)
            )
            rows.clear()

        for document in documents(pool, total_bytes):
            lengths.append(len(document))
            rows.append(document.decode())
            if len(rows) == ROWS_IN_GROUP:
                write()
        if rows:
            write()
    return {
        "text_bytes": sum(lengths),
        "documents": len(lengths),
        "median_document_bytes": int(np.median(lengths)),
        "longest_document_bytes": max(lengths),
        "distinct_source_bytes": sizes,
        "parquet_bytes": (folder / "corpus.parquet").stat().st_size,
        "jsonl_bytes": (folder / "corpus.jsonl").stat().st_size,
    }


def train_tokenizer(folder: Path, most_bytes: int, vocabulary: int = VOCABULARY) -> Path:
    """A byte-level BPE tokenizer of so many tokens, trained on a share of the corpus."""
    import pyarrow.parquet as pq
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    file = pq.ParquetFile(folder / "corpus.parquet")
    texts, size = [], 0
    for batch in file.iter_batches(500):
        texts.extend(batch.column(0).to_pylist())
        size += batch.nbytes
        if size > most_bytes:
            break
    tokenizer.train_from_iterator(texts, trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path
