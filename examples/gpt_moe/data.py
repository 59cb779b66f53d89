# SPDX-License-Identifier: Apache-2.0
"""Text that every machine has, as tokens. A token is a byte unless a Hugging Face tokenizer is given.

The order of the data depends only on (seed, step, rank), so a resumed run needs no saved state of it.
"""

import pydoc_data.topics
import random
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

SEPARATOR = 256  # stands before each piece of text
VOCABULARY = 288  # 256 bytes and the separator, rounded up to a multiple of 32
PIECE_BYTES = 8192
HELDOUT_FRACTION = 0.05
SOURCES = ("stdlib", "pydoc", "installed")

Encode = Callable[[bytes], np.ndarray]


def python_sources(root: Path, without: tuple[str, ...] = ()) -> Iterator[bytes]:
    """The contents of all Python files under `root`, sorted by name. Folders named in `without` are left out."""
    for path in sorted(root.rglob("*.py")):
        # A folder may be named like a Python file, and a link may lead nowhere.
        if path.is_file() and not set(path.relative_to(root).parts).intersection(without):
            yield path.read_bytes()


def check(source: str, option: str = "--data") -> None:
    """Raises FileNotFoundError, naming the command-line option, if the source does not exist."""
    if source not in SOURCES and not Path(source).exists():
        raise FileNotFoundError(f"{option} {source!r}: expected {', '.join(SOURCES)}, or an existing file or folder")


def documents(source: str) -> Iterator[bytes]:
    """The texts of a source.

    source: "stdlib", the sources of Python's standard library without pydoc_data. "pydoc", the English text of
        pydoc_data.topics. "installed", the sources of all installed packages. Else a file or a folder of files.
    """
    check(source)
    if source == "pydoc":
        yield from (text.encode() for _, text in sorted(pydoc_data.topics.topics.items()))
    elif source == "stdlib":
        yield from python_sources(Path(sysconfig.get_path("stdlib")), ("site-packages", "dist-packages", "pydoc_data"))
    elif source == "installed":
        for root in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
            yield from python_sources(Path(root))
    elif Path(source).is_dir():
        yield from (path.read_bytes() for path in sorted(Path(source).rglob("*")) if path.is_file())
    else:
        yield Path(source).read_bytes()


def encode_bytes(text: bytes) -> np.ndarray:
    """A separator, then one token for each byte: int16 [len(text) + 1]."""
    return np.concatenate(([SEPARATOR], np.frombuffer(text, np.uint8))).astype(np.int16)


def encoder_of(model: str | None) -> Encode:
    """Encodes with the tokenizer of a Hugging Face model, to int32. Into bytes, if its files have none.

    If it is not a path, it is the name of a model, and transformers finds its tokenizer.
    """
    if not model or Path(model).exists() and not (Path(model) / "tokenizer_config.json").is_file():
        return encode_bytes
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda text: np.asarray(tokenizer(text.decode(errors="replace"))["input_ids"], np.int32)


def split(texts: Iterator[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Cuts texts into pieces and holds out one in twenty, always the same. Returns (training, held out)."""
    pieces = [text[i:i + PIECE_BYTES] for text in texts for i in range(0, len(text), PIECE_BYTES)]
    if len(pieces) < 2:
        raise ValueError(f"the data has {sum(map(len, pieces))} bytes; at least {PIECE_BYTES + 1} are needed")
    chosen = set(random.Random(0).sample(range(len(pieces)), max(1, round(HELDOUT_FRACTION * len(pieces)))))
    return ([p for i, p in enumerate(pieces) if i not in chosen], [p for i, p in enumerate(pieces) if i in chosen])


class Windows:
    """Windows of seq_len + 1 tokens over one stream. The first seq_len are inputs, the last seq_len are labels.

    Args:
        pieces: texts, which are encoded here. Or the whole stream, encoded, for example as a memory-map.
    """

    def __init__(self, pieces: list[bytes] | np.ndarray, seq_len: int, encode: Encode = encode_bytes):
        encoded = isinstance(pieces, np.ndarray)
        self.stream = pieces if encoded else np.concatenate([encode(piece) for piece in pieces])
        self.seq_len = seq_len
        self.count = (len(self.stream) - 1) // seq_len
        if self.count < 1:
            raise ValueError(f"{len(self.stream)} tokens do not fill one window of {seq_len}: use more text")
        self._order = (None, None)

    def window(self, index: int) -> np.ndarray:
        start = index * self.seq_len
        return self.stream[start:start + self.seq_len + 1]

    def _shuffled(self, seed: int, epoch: int) -> torch.Tensor:
        if self._order[0] != (seed, epoch):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            self._order = ((seed, epoch), torch.randperm(self.count, generator=generator))
        return self._order[1]

    def training_batch(self, seed: int, index: int, batch_size: int, rank: int, world_size: int) -> torch.Tensor:
        """Batch number `index` of `rank`: int64 [batch_size, seq_len + 1]. The ranks divide one order of windows."""
        first = (index * world_size + rank) * batch_size
        rows = []
        for position in range(first, first + batch_size):
            epoch, within = divmod(position, self.count)
            rows.append(self.window(int(self._shuffled(seed, epoch)[within])))
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def heldout_batches(self, batch_size: int, limit: int, rank: int, world_size: int) -> Iterator[torch.Tensor]:
        """Up to `limit` windows, spread evenly over the stream.

        Every rank gets the same number of batches of the same size. If the text is too short, windows repeat.
        """
        batches = max(1, min(limit, self.count) // (batch_size * world_size))
        total = batches * batch_size * world_size
        for batch in range(batches):
            first = (batch * world_size + rank) * batch_size
            indices = [(first + j) * max(1, self.count // total) % self.count for j in range(batch_size)]
            yield torch.from_numpy(np.stack([self.window(i) for i in indices]).astype(np.int64))
