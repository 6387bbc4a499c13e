"""Small vocabularies, trained on a Japanese text, and texts that are hard to cut into tokens."""

import functools
import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

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


# --- Llama's tokenizers, which tiktoken can't read --------------------------------------------------------------------

SPECIAL, BYTES = ["<unk>", "<s>", "</s>"], [f"<0x{b:02X}>" for b in range(256)]


def of_words(model, trainer):
    """Train a tokenizer whose words begin with a space. Return it, and the value of its file."""
    it = tokenizers.Tokenizer(model)
    it.pre_tokenizer = pre_tokenizers.Metaspace()
    it.train_from_iterator(JAPANESE.splitlines(True), trainer)
    return it, json.loads(it.to_str())


def unigram():
    """SentencePiece's: unknown characters become bytes."""
    trainer = trainers.UnigramTrainer(vocab_size=450, special_tokens=SPECIAL, show_progress=False, unk_token="<unk>")
    it, value = of_words(models.Unigram(), trainer)
    rows = [tuple(row) for row in value["model"]["vocab"]]
    it.model = models.Unigram([*rows[:3], *((byte, 0.0) for byte in BYTES), *rows[3:]], 0, byte_fallback=True)
    it.normalizer = normalizers.NFC()
    it.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return it


def bpe():
    """Llama 2's: SentencePiece's with merges."""
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=[*SPECIAL, *BYTES], show_progress=False)
    _, value = of_words(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True), trainer)
    value |= dict(pre_tokenizer=None, added_tokens=value["added_tokens"][:3])
    it = tokenizers.Tokenizer.from_str(json.dumps(value))
    it.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    it.decoder = decoders.Sequence(steps)
    return it


def merges():
    """Llama 3's: it takes whole tokens before it merges."""
    it = trained()
    it.decoder = decoders.ByteLevel()
    it.add_special_tokens(SPECIAL[1:])
    model = json.loads(it.to_str())["model"]
    pairs = [tuple(pair) for pair in model["merges"]]
    it.model = models.BPE(model["vocab"], pairs[: len(pairs) // 2], ignore_merges=True)
    return it


LLAMAS = {"unigram": unigram, "bpe": bpe, "merges": merges}


@functools.cache  # Unigram's training differs in its last digits
def llamas(kind):
    """Return a tokenizer with Llama's template: <s> before a document. kind: of LLAMAS."""
    it = LLAMAS[kind]()
    pair = [("<s>", it.token_to_id("<s>"))]
    it.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=pair)
    return it


def write_llamas(folder, kind):
    folder.mkdir(exist_ok=True)
    llamas(kind).save(str(folder / COPY[0]))
    (folder / COPY[1]).write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder
