"""Small vocabularies, trained on a Japanese text, and texts that are hard to cut into tokens."""

import functools
import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tokenizer import COPY

JAPANESE = Path(__file__).with_name("japanese.txt").read_text("utf-8")
END = "<|endoftext|>"
# All classes of the patterns: letters, numbers, apostrophes, contractions, all kinds of spaces, separators, marks. Also
# characters that Python and tiktoken may classify differently, and the text of an end-of-text token.
ATOMS = [
    *"aZé中한ж9٣½'\u2019!.\u0301_-<|>ー、「ǅʰ\u017f", *" \n\r\t\xa0\u2028\u3000\x1c\x1f\x85\u200b\u180e",
    *" \n" * 6, END,
    *"'ts" * 3, "'s", "'ll", "'S", "n't", "  ", "\r\n", "😀", "/", "\n/", "hello", "12345", "!!!", "。\n", "日本語",
]  # fmt: skip


def text_of_atoms(rng, length):
    return "".join(rng.choices(ATOMS, k=length))


def trained(size=600, pattern=None):
    """Return a Hugging Face tokenizer: byte-level BPE with `size` ids. pattern: None is GPT-2's."""
    it = tokenizers.Tokenizer(models.BPE())
    it.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        it.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    it.train_from_iterator((JAPANESE + "34 34 34 45 45 12\n" * 9).splitlines(True), trainer)
    return it


@functools.cache  # Unigram's training differs in its last digits
def llamas(kind):
    """Return a tokenizer that tiktoken can't read, with Llama's special tokens and template: <s> before a document.

    unigram: SentencePiece's (words begin with a space, unknown characters become bytes). bpe: Llama 2's, the same with
    merges. merges: Llama 3's, which takes whole tokens before it merges.
    """
    special = ["<unk>", "<s>", "</s>"]
    if kind == "merges":
        it = trained()
        it.decoder = decoders.ByteLevel()
        it.add_special_tokens(["<s>", "</s>"])
        model = json.loads(it.to_str())["model"]
        merges = [tuple(pair) for pair in model["merges"]]
        it.model = models.BPE(model["vocab"], merges[: len(merges) // 2], ignore_merges=True)
    else:
        it = tokenizers.Tokenizer(models.Unigram() if kind == "unigram" else models.BPE(unk_token="<unk>"))
        options = dict(vocab_size=450, special_tokens=special, show_progress=False)
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **options)
        if kind == "bpe":
            bytes_of = [f"<0x{b:02X}>" for b in range(256)]
            trainer = trainers.BpeTrainer(**options | dict(vocab_size=1200, special_tokens=[*special, *bytes_of]))
        it.pre_tokenizer = pre_tokenizers.Metaspace()
        it.train_from_iterator(JAPANESE.splitlines(True), trainer)
        if kind == "unigram":
            rows = [tuple(row) for row in json.loads(it.to_str())["model"]["vocab"]]
            of_bytes = [(f"<0x{b:02X}>", 0.0) for b in range(256)]
            it.model = models.Unigram([*rows[:3], *of_bytes, *rows[3:]], 0, byte_fallback=True)
            it.normalizer = tokenizers.normalizers.NFC()
        else:
            value = json.loads(it.to_str())
            value["added_tokens"] = value["added_tokens"][:3]
            value |= dict(pre_tokenizer=None, normalizer=LLAMA2)
            value["model"] |= dict(byte_fallback=True, fuse_unk=True)
            it = tokenizers.Tokenizer.from_str(json.dumps(value))
        steps = [decoders.ByteFallback(), decoders.Metaspace()]
        if kind == "bpe":
            steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        it.decoder = decoders.Sequence(steps)
    pair = [("<s>", it.token_to_id("<s>"))]
    it.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=pair)
    return it


LLAMA2 = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ],
}
LLAMAS = ["unigram", "bpe", "merges"]


def write_llamas(folder, kind):
    folder.mkdir(exist_ok=True)
    llamas(kind).save(str(folder / COPY[0]))
    (folder / COPY[1]).write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder
