"""Test indexed.py: Megatron-LM's .bin and .idx become the data set that prepare.py makes of the same text.

`write` below writes the two files from the format's description, without indexed.py. The tests run the command in its
own process, as test_prepare.py does, mostly with blocks of 64 tokens and 8 documents.
"""

import random
import signal
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import documents
import indexed
import prepare
from errors import UserError
from test_prepare import (  # noqa: F401 (gpt2 is a fixture)
    BYTES,
    CRASHES,
    KILL,
    SMALL,
    error_of,
    files_in,
    gpt2,
    meta_in,
    random_text,
    run,
    tokens_in,
    write_json_lines,
)

EOT = BYTES.eot_token
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8, "uint32": 9, "uint64": 10}
TOKENIZER = "--tokenizer=bytes"


def write(prefix, texts, dtype="uint16", **other) -> Path:
    """Write `texts`, lists of sequences (lists of ids), as PREFIX.bin and PREFIX.idx. other: wrong values of fields."""
    sequences = [sequence for text in texts for sequence in text]
    sizes, width = [len(sequence) for sequence in sequences], np.dtype(dtype).itemsize
    field = {
        "magic": b"MMIDIDX\x00\x00",
        "version": 1,
        "code": CODES.get(dtype, 7),
        "S": len(sequences),
        "bounds": [sum(map(len, texts[:d])) for d in range(len(texts) + 1)],
        "sizes": sizes,
        "pointers": [width * sum(sizes[:s]) for s in range(len(sizes))],
        "more": b"",
        **other,
    }
    data = field["magic"] + struct.pack("<Q", field["version"]) + struct.pack("<B", field["code"])
    data += struct.pack("<QQ", field["S"], len(field["bounds"]))
    data += struct.pack(f"<{len(sizes)}i", *field["sizes"]) + struct.pack(f"<{len(sizes)}q", *field["pointers"])
    data += struct.pack(f"<{len(field['bounds'])}q", *field["bounds"]) + field["more"]
    Path(f"{prefix}.idx").write_bytes(data)
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(s, dtype).tobytes() for s in sequences))
    return Path(prefix)


def random_texts(rng, number, longest=40, eot=True):
    """Documents of 0 to 4 sequences of byte tokens, also empty ones. eot: the end-of-text token ends each document."""
    texts = []
    for _ in range(number):
        text = [[rng.randrange(256) for _ in range(rng.randrange(longest))] for _ in range(rng.randrange(5))]
        if eot:
            text = [*text[:-1], [*text[-1], EOT]] if text else [[EOT]]
        texts.append(text)
    return texts


def expected(texts, weights):
    """{split: tokens}: the sequences of document d and an end-of-text token, in the split of line d + 1."""
    splits = {split: [] for split in prepare.SPLITS}
    for d, text in enumerate(texts):
        tokens = [token for sequence in text for token in sequence]
        tokens += [] if tokens[-1:] == [EOT] else [EOT]
        splits[prepare.SPLITS[prepare.split_of(0, d + 1, weights)]] += tokens
    return splits


# --- good files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("eod", [True, False])
def test_the_data_set_equals_that_of_the_same_text(gpt2, tmp_path, sequences, eod):  # noqa: F811
    """tiktoken's tokens in Megatron-LM's files, with or without --append-eod, give the data set of the text."""
    rng = random.Random(0)
    texts = ["", *(random_text(rng, rng.choice([1, 30, 3000])) for _ in range(300)), ""]
    run(write_json_lines(tmp_path / "a.jsonl", texts), f"--out={tmp_path}/text", "--tokenizer=gpt2", "--split=6,3,1")
    encoded = []
    for text in texts:
        tokens = [*gpt2.encode_ordinary(text), *([gpt2.eot_token] if eod else [])]
        cuts = sorted(rng.randrange(len(tokens) + 1) for _ in range(sequences - 1))
        encoded.append([tokens[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)])
    prefix = write(tmp_path / "a_text_document", encoded)
    output = run(f"--megatron={prefix}", f"--out={tmp_path}/out", "--tokenizer=gpt2", "--split=6,3,1")
    assert tokens_in(tmp_path / "out") == tokens_in(tmp_path / "text")
    ours, theirs = meta_in(tmp_path / "out"), meta_in(tmp_path / "text")
    assert {**ours, "made_from": 0} == {**theirs, "made_from": 0}
    assert ours["made_from"]["input"]["files"] == 2
    line = "302 of 302 documents did not end with the end-of-text token (Megatron-LM's --append-eod); it was appended"
    assert (line in output) == (not eod) and f"--data_dir={tmp_path}/out" in output


@pytest.mark.parametrize("before", ["", SMALL])
@pytest.mark.parametrize("dtype", ["int16", "int32", "int64", "uint16", "uint32", "uint64"])
def test_every_dtype_and_any_blocks(dtype, before, tmp_path):
    rng = random.Random(dtype)
    texts = random_texts(rng, 200) + random_texts(rng, 200, eot=False)
    texts[100:100] = [[]] * 30  # more empty documents than fit into a block
    texts[50:50] = [
        [[1] * 63, [EOT]],
        [[2] * 63],
        [],
        [[3] * 1000, [4] * 1000, []],
        [[]],
    ]  # some end a block; some are long
    prefix = write(tmp_path / "data", texts, dtype)
    output = run(f"--megatron={prefix}", f"--out={tmp_path}/out", TOKENIZER, "--split=6,3,1", before=before)
    right = expected(texts, (6, 3, 1))
    assert tokens_in(tmp_path / "out") == right
    assert sum(meta_in(tmp_path / "out")["documents"].values()) == len(texts) == 435
    appended = sum(map(len, right.values())) - sum(len(sequence) for text in texts for sequence in text)
    assert f"{appended} of 435 documents did not end" in output and appended > 200


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_one_byte_per_token(dtype, tmp_path):
    write(tmp_path / "data", [[[1, 2], [127]], [[3]]], dtype)
    run(f"--megatron={tmp_path}/data.idx", f"--out={tmp_path}/out", TOKENIZER, "--split=1,0,0")
    assert tokens_in(tmp_path / "out")["train"] == [1, 2, 127, EOT, 3, EOT]


def test_the_default_output_has_the_name_of_the_prefix(tmp_path):
    write(tmp_path / "web.v2_document", [[[1, 2]]])
    output = run("--megatron=web.v2_document", TOKENIZER, "--split=1,0,0", cwd=tmp_path)
    assert tokens_in(tmp_path / "data/web.v2_document_bytes")["train"] == [1, 2, EOT]
    assert "--data_dir=data/web.v2_document_bytes" in output
    again = run("--megatron=web.v2_document", TOKENIZER, "--split=1,0,0", cwd=tmp_path)
    assert "data/web.v2_document_bytes is already finished: nothing to do\n" in again


def test_blocks_are_bounded_and_cover_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE", 64)
    texts = random_texts(random.Random(1), 300) + [[]] * 100 + [[[1] * 5000]]
    data = indexed.Indexed(str(write(tmp_path / "data", texts)))
    blocks = [block for (block,) in data.blocks()]
    assert max(b.stop - b.start for b in blocks) == 64 and max(len(b.bounds) - 1 for b in blocks) == 8
    assert [b.start for b in blocks] == [0, *(b.stop for b in blocks[:-1])] and blocks[-1].stop == data.num_tokens
    files = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert sum(b.used for b in blocks) == files - 34 - 8  # all but the header and one boundary


def test_memory_does_not_depend_on_the_size(tmp_path):
    """Convert a sparse .bin of 2 GB (zeros), with a million documents and with one."""
    n = 1 << 20
    sizes, pointers = np.full(n, 1000, "<i4"), np.arange(n, dtype="<i8") * 2000
    for name, bounds in {"many": np.arange(n + 1, dtype="<i8"), "one": np.array([0, n], "<i8")}.items():
        with open(tmp_path / f"{name}.idx", "wb") as file:
            file.write(struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, n, len(bounds)))
            for array in (sizes, pointers, bounds):
                file.write(array.tobytes())
        with open(tmp_path / f"{name}.bin", "wb") as file:
            file.truncate(2000 * n)
    program = """
        import resource, sys, indexed, tokenizer
        def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        encoding, tokens, before = tokenizer.load_tokenizer("bytes"), 0, peak()
        data = indexed.Indexed(sys.argv[1])
        data.check()
        for block, in data.blocks():
            pieces, counts = data.convert(block, encoding, "bytes", lambda d: 0)
            tokens += len(pieces[0]) // 2
        print(tokens, peak() - before)"""
    for name, documents_ in {"many": n, "one": 1}.items():
        command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
        tokens, grown = map(int, done.stdout.split())
        assert tokens == 1000 * n + documents_
        assert grown < 150, f"{grown} MB"


# --- stops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("crash", CRASHES)
def test_after_kill_9_the_same_command_ends_in_the_same_bytes(tmp_path, crash):
    prefix = write(tmp_path / "data", random_texts(random.Random(2), 1500, eot=False))
    command = [f"--megatron={prefix}", TOKENIZER, "--split=6,3,1"]
    run(*command, f"--out={tmp_path}/right")
    run(*command, f"--out={tmp_path}/out", before=SMALL + KILL + CRASHES[crash], code=-signal.SIGKILL)
    whole = crash == "after meta.json"
    assert ("meta.json" in files_in(tmp_path / "out")) == whole
    output = run(*command, f"--out={tmp_path}/out", before=SMALL)
    found = files_in(tmp_path / "out")
    found.pop("prepare.lock", None)  # of the killed run, if its folder was already complete
    assert found == files_in(tmp_path / "right")
    assert ("resuming after" in output) == (not whole and crash != "while the state is saved")
    # The count is that of both runs together. If the folder was complete, nothing is read again.
    assert whole or "1,500 of 1,500 documents did not end" in output


# --- mistakes ---------------------------------------------------------------------------------------------------------

GOOD = [[[1, 2, 3], [4]], [[5, 6, EOT]]]  # sizes 3 1 3, pointers 0 6 8, bounds 0 2 3; .idx 94, .bin 14 bytes
IDX = "{p}.idx: "
WRONG = {
    "magic": ({"magic": b"MMIDIDY\0\0"}, IDX + "not an index of Megatron-LM"),
    "old": ({"magic": b"TNTIDX\0\0\1"}, IDX + "made with --dataset-impl=lazy or cached; encode the text with mmap"),
    "version": ({"version": 2}, IDX + "version 2, but only version 1 is known"),
    "float": ({"code": 7}, IDX + "dtype code 7 is floating point, not token ids"),
    "double": ({"code": 6}, IDX + "dtype code 6 is floating point"),
    "code": ({"code": 99}, IDX + "dtype code 99 is unknown"),
    "too many": ({"S": 1 << 60}, IDX + "truncated: 94 bytes, but 1,152,921,504,606,846,976 sequences"),
    "no boundary": ({"bounds": []}, IDX + "damaged: 70 bytes, but 3 sequences and 0 document boundaries"),
    "longer": ({"more": b"12345"}, IDX + "too long: 99 bytes, but 3 sequences and 3 document boundaries are 94 bytes"),
    "modes": ({"more": b"\0\1\0"}, IDX + "multimodal data (a mode for each sequence); only text"),
    "negative": ({"sizes": [3, -1, 3]}, IDX + "damaged: sequence 1 has -1 tokens"),
    "size": ({"sizes": [3, 2, 2]}, IDX + "damaged: sequence 2 begins at byte 8, but the sizes before it give 10"),
    "pointer": ({"pointers": [0, 6, 9]}, IDX + "damaged: sequence 2 begins at byte 9, but the sizes before it give 8"),
    "begin": ({"pointers": [2, 8, 10]}, IDX + "damaged: sequence 0 begins at byte 2, but the sizes before it give 0"),
    "last size": ({"sizes": [3, 1, 4]}, "{p}.bin: truncated: 14 bytes, but {p}.idx describes 16"),
    "last less": ({"sizes": [3, 1, 2]}, "{p}.bin: too long: 14 bytes, but {p}.idx describes 12"),
    "first": ({"bounds": [1, 2, 3]}, IDX + "damaged: the first document begins at sequence 1, not at 0"),
    "below": ({"bounds": [0, -1, 3]}, IDX + "damaged: document 0 begins at sequence 0 and ends at sequence -1"),
    "order": ({"bounds": [0, 5, 3]}, IDX + "damaged: document 1 begins at sequence 5 and ends at sequence 3"),
    "end": ({"bounds": [0, 1, 2]}, IDX + "damaged: the last document ends at sequence 2, but there are 3 sequences"),
    "beyond": ({"bounds": [0, 2, 4]}, IDX + "damaged: the last document ends at sequence 4, but there are 3 sequences"),
}


@pytest.mark.parametrize("chunk", [1, 1 << 20])
@pytest.mark.parametrize("name", WRONG)
def test_a_damaged_index_is_one_line(name, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(indexed, "CHUNK", chunk)
    fields, message = WRONG[name]
    prefix = write(tmp_path / "data", GOOD, **fields)
    with pytest.raises(UserError) as error:
        indexed.Indexed(str(prefix)).check()
    assert str(error.value).startswith(message.format(p=prefix)) and "\n" not in str(error.value)


def test_a_good_index_has_no_mistake(tmp_path):
    indexed.Indexed(str(write(tmp_path / "data", GOOD))).check()


def test_a_truncated_index_is_one_line(tmp_path):
    prefix = write(tmp_path / "data", GOOD)
    data = (tmp_path / "data.idx").read_bytes()
    for left in range(len(data)):
        (tmp_path / "data.idx").write_bytes(data[:left])
        with pytest.raises(UserError, match=r"truncated: |should start with MMIDIDX"):
            indexed.Indexed(str(prefix)).check()


@pytest.mark.parametrize("dtype, left", [("uint16", 13), ("uint16", 12), ("uint16", 0), ("int32", 26), ("int64", 55)])
def test_a_truncated_bin_is_one_line(dtype, left, tmp_path):
    prefix = write(tmp_path / "data", GOOD, dtype)
    (tmp_path / "data.bin").write_bytes((tmp_path / "data.bin").read_bytes()[:left])
    message = error_of(f"--megatron={prefix}", f"--out={tmp_path}/out", TOKENIZER)
    assert message.startswith(f"error: {prefix}.bin: truncated: ")
    assert not (tmp_path / "out").exists()


def test_a_bin_with_one_more_byte_is_one_line(tmp_path):
    prefix = write(tmp_path / "data", GOOD)
    (tmp_path / "data.bin").write_bytes((tmp_path / "data.bin").read_bytes() + b"1")
    with pytest.raises(UserError, match=r"data.bin: too long: 15 bytes, but .*/data.idx describes 14"):
        indexed.Indexed(str(prefix)).check()


@pytest.mark.parametrize("dtype, wrong", [("uint16", 257), ("uint16", 65535), ("int32", -1), ("int64", 1 << 40)])
def test_an_id_outside_the_vocabulary_is_one_line(dtype, wrong, tmp_path):
    texts = [[[7] * 100], [[8] * 50, [9, wrong, 9]]]
    prefix = write(tmp_path / "data", texts, dtype)
    message = error_of(f"--megatron={prefix}", f"--out={tmp_path}/out", TOKENIZER, before=SMALL)
    where = f"id {wrong} at token 151, but --tokenizer=bytes has the ids 0 to 256"
    assert message == f"error: {prefix}.bin: {where}; use the tokenizer that encoded it"
    assert "meta.json" not in files_in(tmp_path / "out")


def test_files_that_are_not_there(tmp_path):
    for suffix in ("idx", "bin"):
        prefix = write(tmp_path / "data", GOOD)
        (tmp_path / f"data.{suffix}").unlink()
        message = error_of(f"--megatron={prefix}", f"--out={tmp_path}/out", TOKENIZER)
        assert message == f"error: {prefix}.{suffix}: No such file or directory"


def test_a_file_that_shrinks_while_it_is_read_is_one_line(tmp_path):
    data = indexed.Indexed(str(write(tmp_path / "data", GOOD)))
    blocks = list(data.blocks())
    (tmp_path / "data.bin").write_bytes(b"12")
    with pytest.raises(UserError, match=r"data.bin: truncated while it was read"):
        data.tokens(blocks[0][0], 257, "bytes")
    (tmp_path / "data.idx").write_bytes(b"12")
    with pytest.raises(UserError, match=r"data.idx: truncated while it was read"):
        data.check()


@pytest.mark.parametrize("option", ["text.txt", "--workers=2", "--text_key=content", "--on_error=skip"])
def test_an_option_for_text_is_refused(option, tmp_path):
    prefix = write(tmp_path / "data", GOOD)
    name = option if option.startswith("--") else f"input {option}"
    message = error_of(option, f"--megatron={prefix}", f"--out={tmp_path}/out", TOKENIZER)
    assert message == f"error: {name}: is for text, but --megatron={prefix} is already encoded; leave one out"


@pytest.mark.parametrize("texts", [[], [[]], [[[EOT]], []]])
def test_no_token_of_text(texts, tmp_path):
    prefix = write(tmp_path / "data", texts)
    message = error_of(f"--megatron={prefix}", f"--out={tmp_path}/out", TOKENIZER)
    assert message == "error: the input is empty: no text in 2 files"
