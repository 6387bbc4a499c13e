"""Compute a checksum of a file or a tensor. Each rank can compute a part of the sum, and the parts add up.

Read the bytes as words w_0, w_1, ... of 8 bytes. The sum is

    S = c_0 w_0 + c_1 w_1 + ...  mod 2^64        c_i = TABLE[i mod BLOCK] * G^(i div BLOCK), an odd number

    adds up      A rank that has some of the words computes their terms. The terms of all ranks add up to S, in any
                 order. So ranks can write and read one file in pieces, in any layout, and none of them reads all of it.
    one word     An odd c_i has an inverse mod 2^64. If one word changes, in one bit or in many, S always changes.
    many words   The c_i are pseudo-random. If several words change or swap places, S stays equal only by chance
                 (multilinear hashing; Carter and Wegman, "Universal classes of hash functions", 1979).

The sum finds errors of disks, memory and networks. It does not protect against a forged file. `python -m bench
checkpoint` measures its speed.
"""

import functools

import numpy as np
import torch

from data import mix

BLOCK = 1 << 17  # words in TABLE: 1 MiB, which stays in a core's cache
G = 0x9E3779B97F4A7C15
TABLE = mix(np.arange(1, BLOCK + 1, dtype=np.uint64)) | 1


def of_bytes(data, offset=0):
    """Return the part of a file's sum that comes from `data`, an int below 2^64.

    data: a contiguous array [n] of any dtype. offset: its place in the file, in bytes. If data begins or ends inside a
    word, the other bytes of the word count as 0.
    """
    lead, tail = offset % 8, -(offset + data.nbytes) % 8
    if lead or tail:
        data = np.pad(data.view(np.uint8), (lead, tail))
    words, at, total = data.view(np.uint64), (offset - lead) // 8, 0
    while len(words):
        row, column = divmod(at, BLOCK)
        block = words[: BLOCK - column]
        total += int(np.dot(block, TABLE[column : column + len(block)])) * pow(G, row, 1 << 64)
        at, words = at + len(block), words[len(block) :]
    return total % (1 << 64)


def of_rows(rows, offset, stride):
    """Return the part of a file's sum that comes from `rows`, an int below 2^64.

    rows: a contiguous array [k, n] uint8. Row i begins at byte offset + i * stride of the file. One call multiplies all
    rows that lie in a block, because a call for each row would take longer than the products.
    """
    if len(rows) == 1 or (offset | stride | rows.shape[1]) % 8:
        return sum(of_bytes(row, offset + i * stride) for i, row in enumerate(rows)) % (1 << 64)
    words, at, step, total = rows.view(np.uint64), offset // 8, stride // 8, 0
    while len(words):
        row, column = divmod(at, BLOCK)
        count = max(1, (BLOCK - column - words.shape[1]) // step + 1)  # rows that end in this block
        now, words = words[:count], words[count:]
        if column + now.shape[1] <= BLOCK:
            table = np.lib.stride_tricks.as_strided(TABLE[column:], now.shape, (8 * step, 8))
            total += int(np.einsum("ij,ij->", now, table)) * pow(G, row, 1 << 64)
        else:
            total += of_bytes(now[0], 8 * at)
        at += count * step
    return total % (1 << 64)


def of_tensor(x):
    """Return the sum of a contiguous tensor [n] (a multiple of 8 bytes) as an int64 tensor [] on its device."""
    if x.is_cuda:
        return of_words(x.view(torch.int64))
    return torch.tensor(signed(of_bytes(x.view(torch.uint8).numpy())))


def of_words(words):
    """Return the sum of words [n] int64 as an int64 tensor []. It runs on any device; `of_tensor` uses it on a GPU."""
    table, total = table_on(words.device), torch.zeros((), dtype=torch.int64, device=words.device)
    for row, block in enumerate(words.split(BLOCK)):
        total += (block * table[: len(block)]).sum() * signed(pow(G, row, 1 << 64))
    return total


@functools.cache
def table_on(device):
    """Return TABLE as an int64 tensor [BLOCK] on a device."""
    return torch.from_numpy(TABLE.view(np.int64)).to(device)


def signed(total):
    """Return the int64 that has the same bits as `total`, an int below 2^64. PyTorch has few operations on uint64."""
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def as_text(total):
    """Return a sum, signed or not, as 16 hexadecimal digits."""
    return f"{int(total) % (1 << 64):016x}"
