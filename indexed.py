"""Read Megatron-LM's encoded data, `PREFIX.bin` and `PREFIX.idx`, for `python prepare.py --megatron=PREFIX --out=DIR`.

Megatron-LM and Megatron-DeepSpeed encode text with `tools/preprocess_data.py --dataset-impl=mmap` (newer versions know
only this format). `PREFIX.bin` contains only token ids. `PREFIX.idx` contains the boundaries, all little-endian
(megatron/core/datasets/indexed_dataset.py). S is the number of sequences (parts of documents), D the
number of documents, i the bytes of a token:

    byte            bytes
    0               9          magic: M M I D I D X 0 0
    9               8          version: 1
    17              1          code of the tokens' dtype, see DTYPES
    18              8          S
    26              8          D + 1
    34              4 S        size of each sequence: number of tokens
    34 +  4 S       8 S        pointer of each sequence: its first byte in PREFIX.bin
    34 + 12 S       8 (D + 1)  document boundaries: document d has the sequences boundary[d] .. boundary[d + 1] - 1
    42 + 12 S + 8 D            end; in multimodal data, one more byte for each sequence follows

    boundaries      0           2   3            example: S = 3, D = 2, i = 2
    sizes           3     1     2                document 0 has two sequences, for example two sentences
    pointers        0     6     8
    PREFIX.bin      a b c d     e f              12 bytes

The .idx does not name the vocabulary, so the user names it (--tokenizer), and every id is checked against the size of
the vocabulary. prepare.py and data.py need the end-of-text token after each document, also after an empty one.
Megatron-LM writes this token only with --append-eod. If a document does not end with the token, it is appended here.
The data set is then equal to the data set of the same texts in one .jsonl file: document d takes the place of line d +
1.

The whole .idx is read and checked before any output. Writing reads each file once. At most one block of tokens is in
memory (`Indexed.blocks`), so the memory does not depend on the size of the files.
"""

import os
import struct
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

import documents
from errors import UserError, explained

MAGIC, OLD_MAGIC = b"MMIDIDX\0\0", b"TNTIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")  # 34 bytes, without padding
# All codes. Megatron-LM has 1 to 8; 7 is float64 or float32, depending on the version. Other projects added 9 and 10.
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "float", 7: "float", 8: "<u2", 9: "<u4", 10: "<u8"}
CHUNK = 1 << 20  # entries of the .idx that are checked at a time


class Block(NamedTuple):
    """Consecutive tokens of the .bin. The first document may begin before the block, the last may end after it."""

    start: int  # first token
    stop: int  # end of the tokens
    document: int  # number of the first document
    bounds: np.ndarray  # first token of this document, and the end of each document that ends in the block
    used: int  # bytes of the .bin and the .idx that belong to the block
    begins: bool = True  # prepare.Output needs it to skip a bad document; no document is skipped here


class Indexed:
    """The two files of a prefix. The constructor checks the header and the sizes of the files. Raises UserError."""

    def __init__(self, prefix: str):
        self.bin, self.idx = files(prefix)
        with explained(self.idx), open(self.idx, "rb") as file:
            header, size = file.read(HEADER.size), os.fstat(file.fileno()).st_size
        if header.startswith(OLD_MAGIC):
            raise UserError(f"{self.idx}: made with --dataset-impl=lazy or cached; encode the text with mmap")
        if not header.startswith(MAGIC):
            raise UserError(f"{self.idx}: not an index of Megatron-LM: it should start with MMIDIDX")
        if len(header) < HEADER.size:
            raise UserError(f"{self.idx}: truncated: {size} bytes, but the header alone has {HEADER.size}")
        _, version, code, self.num_sequences, bounds = HEADER.unpack(header)
        if version != 1:
            raise UserError(f"{self.idx}: version {version:,}, but only version 1 is known; the file may be damaged")
        if DTYPES.get(code, "float") == "float":
            what = "floating point, not token ids" if code in DTYPES else "unknown; the file may be damaged"
            raise UserError(f"{self.idx}: dtype code {code} is {what}")
        self.dtype, self.num_documents = np.dtype(DTYPES[code]), bounds - 1
        self.check_length(size, bounds)
        with explained(self.bin):
            self.bin_size = os.stat(self.bin).st_size
        self.num_tokens = self.bin_size // self.dtype.itemsize

    def check_length(self, size: int, bounds: int):
        """Compare the size of the .idx with the numbers in its header. `bounds`: number of document boundaries."""
        s = self.num_sequences
        self.pointers_at, self.bounds_at = HEADER.size + 4 * s, HEADER.size + 12 * s
        should = self.bounds_at + 8 * bounds
        if bounds and s and size == should + s:
            raise UserError(f"{self.idx}: multimodal data (a mode for each sequence); only text can be converted")
        if size != should or not bounds:
            what = "truncated" if size < should else "damaged" if not bounds else "too long"
            why = f"{size:,} bytes, but {s:,} sequences and {bounds:,} document boundaries are {should:,} bytes"
            raise UserError(f"{self.idx}: {what}: {why}")

    # -- the arrays of the .idx

    def read(self, at: int, dtype: str, first: int, count: int) -> np.ndarray:
        """Return `count` entries, from entry `first`, of the array at byte `at` of the .idx, as int64."""
        with explained(self.idx):
            entries = np.fromfile(self.idx, dtype, count, offset=at + first * np.dtype(dtype).itemsize)
        if len(entries) < count:
            raise UserError(f"{self.idx}: truncated while it was read")
        return entries.astype(np.int64)

    def positions(self, sequences: np.ndarray) -> np.ndarray:
        """Return the position of each sequence's first token in the .bin. Sequence S gives the end of the .bin."""
        inside, found = sequences < self.num_sequences, np.full(len(sequences), self.num_tokens)
        if inside.any():  # a new mapping for each call, so its pages leave this process's memory afterwards
            pointers = np.memmap(self.idx, "<i8", "r", self.pointers_at, (self.num_sequences,))
            found[inside] = pointers[sequences[inside]] // self.dtype.itemsize
        return found

    def check(self):
        """Check that sizes, pointers, boundaries and the .bin agree. Raises UserError."""
        total = self.num_sequences + self.num_documents + 1
        with tqdm(total=total, desc=f"check {os.path.basename(self.idx)}", unit_scale=True, leave=False) as bar:
            pointer = 0  # where the next sequence should begin
            for first in range(0, self.num_sequences, CHUNK):
                pointer = self.check_sequences(first, min(CHUNK, self.num_sequences - first), pointer)
                bar.update(CHUNK)
            if pointer != self.bin_size:
                what = "truncated" if self.bin_size < pointer else "too long"
                raise UserError(f"{self.bin}: {what}: {self.bin_size:,} bytes, but {self.idx} describes {pointer:,}")
            before = 0  # boundary before this chunk
            for first in range(0, self.num_documents + 1, CHUNK):
                before = self.check_boundaries(first, min(CHUNK, self.num_documents + 1 - first), before)
                bar.update(CHUNK)
        if before != self.num_sequences:
            why = f"the last document ends at sequence {before:,}, but there are {self.num_sequences:,} sequences"
            raise UserError(f"{self.idx}: damaged: {why}")

    def check_sequences(self, first: int, count: int, pointer: int) -> int:
        """Check `count` sequences. The first should begin at byte `pointer` of the .bin. Return the end of the last."""
        sizes = self.read(HEADER.size, "<i4", first, count)
        if sizes.min() < 0:
            i = sizes.argmin()
            raise UserError(f"{self.idx}: damaged: sequence {first + i:,} has {sizes[i]:,} tokens")
        ends = pointer + np.cumsum(sizes * self.dtype.itemsize)
        pointers, should = self.read(self.pointers_at, "<i8", first, count), np.append(pointer, ends[:-1])
        if (wrong := pointers != should).any():
            i = wrong.argmax()
            why = f"sequence {first + i:,} begins at byte {pointers[i]:,}, but the sizes before it give {should[i]:,}"
            raise UserError(f"{self.idx}: damaged: {why}")
        return int(ends[-1])

    def check_boundaries(self, first: int, count: int, before: int) -> int:
        """Check document boundaries that follow the boundary `before`. Return the last one."""
        bounds = self.read(self.bounds_at, "<i8", first, count)
        if not first and bounds[0]:
            raise UserError(f"{self.idx}: damaged: the first document begins at sequence {bounds[0]:,}, not at 0")
        steps = np.diff(bounds, prepend=before)
        if steps.min() < 0:
            i = int((steps < 0).argmax())
            begin = bounds[i] - steps[i]
            why = f"document {first + i - 1:,} begins at sequence {begin:,} and ends at sequence {bounds[i]:,}"
            raise UserError(f"{self.idx}: damaged: {why}")
        return int(bounds[-1])

    # -- the copy

    def blocks(self):
        """Yield blocks of at most documents.PIECE tokens and an eighth as many documents, each as [Block].

        A long document is cut anywhere, because it is already encoded. The list is prepare.py's form of a block.
        """
        start = document = 0
        most = max(1, documents.PIECE // 8)
        while document < self.num_documents:
            count = min(most, self.num_documents - document)
            sequences = self.read(self.bounds_at, "<i8", document, count + 1)
            bounds = self.positions(sequences)
            complete = int(np.searchsorted(bounds[1:], start + documents.PIECE, side="right"))
            stop = int(bounds[-1]) if complete == count else start + documents.PIECE
            used = (stop - start) * self.dtype.itemsize + 8 * complete + 12 * int(sequences[complete] - sequences[0])
            yield [Block(start, stop, document, bounds[: complete + 1], used)]
            start, document = stop, document + complete

    def tokens(self, block: Block, vocab_size: int, tokenizer: str) -> np.ndarray:
        """Return the tokens of a block in the dtype of the .bin. Raises UserError for an id outside the vocabulary."""
        with explained(self.bin):
            count = block.stop - block.start
            tokens = np.fromfile(self.bin, self.dtype, count, offset=block.start * self.dtype.itemsize)
        if len(tokens) < count:
            raise UserError(f"{self.bin}: truncated while it was read")
        ids = tokens.view(self.dtype.str.replace("i", "u"))  # a negative id is a huge one
        if count and ids.max() >= vocab_size:
            i = int((ids >= vocab_size).argmax())
            where = f"id {tokens[i]} at token {block.start + i:,}"
            remedy = "use the tokenizer that encoded it"
            raise UserError(
                f"{self.bin}: {where}, but --tokenizer={tokenizer} has the ids 0 to {vocab_size - 1}; {remedy}"
            )
        return tokens

    def convert(self, block: Block, encoding, tokenizer: str, split_of, dtype="<u2"):
        """Return (tokens as bytes, number of documents), each a list with one entry per split.

        split_of: a function that returns the split of a document from its number. encoding: has n_vocab and eot_token.
        """
        tokens = self.tokens(block, encoding.n_vocab, tokenizer).astype(dtype, copy=False)
        ends = block.bounds[1:] - block.start
        full = np.diff(block.bounds) > 0
        lacks = ~full  # documents that need an end-of-text token
        lacks[full] = tokens[ends[full] - 1] != encoding.eot_token
        if lacks.any():
            tokens, ends = np.insert(tokens, ends[lacks], encoding.eot_token), ends + np.cumsum(lacks)
        open_end = len(tokens) > (ends[-1] if len(ends) else 0)  # the last document continues in the next block
        splits = np.array([split_of(block.document + d) for d in range(len(ends) + open_end)])
        # neighbouring documents of the same split are copied together
        last = np.append(np.flatnonzero(np.diff(splits)), len(splits) - 1)
        cuts = np.append(ends, len(tokens))[last]
        pieces = [[], [], []]
        for piece, split in zip(np.split(tokens, cuts[:-1]), splits[last], strict=True):
            pieces[split].append(piece)
        return [b"".join(group) for group in pieces], np.bincount(splits[: len(ends)], minlength=3).tolist()


def files(prefix: str) -> tuple[str, str]:
    """Return the paths of the .bin and the .idx. The prefix may be the path of one of them."""
    if prefix.endswith((".bin", ".idx")):
        prefix = prefix[:-4]
    return prefix + ".bin", prefix + ".idx"
