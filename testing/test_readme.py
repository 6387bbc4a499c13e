"""Tests README.md and the other pages: the names in them exist, and their commands print the text shown there."""

import ast
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import config
from testing.vocabularies import write_llamas

HERE = Path(__file__).parent.parent
PAGES = "README.md", "SLIDES.md", "GUIDE.md", "MEASURED.md", "NOTES.md"
TEXTS = {page: (HERE / page).read_text("utf-8") for page in PAGES}
README, SLIDES, GUIDE, MEASURED, NOTES = TEXTS.values()
JAPANESE = (HERE / "README.ja.md").read_text("utf-8")
TIME = re.compile(r"(elapsed time per iteration \(ms\): )\d+\.\d")


def run(words, folder, **fields):
    """Run a page's command (words) in a folder, with this tree's programs. Return its output."""
    program, *arguments = words
    program = [sys.executable] if program == "python" else [program, "--local-addr=localhost"]
    command = program + [str(HERE / word) if (HERE / word).is_file() else word for word in arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, **fields)
    assert done.returncode == 0, f"{shlex.join(command)}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


# --- names ------------------------------------------------------------------------------------------------------------


def test_the_readme_is_one_page():
    assert README.count("\n") <= 240
    for text, longest in ((README, 200), (SLIDES, 240)):
        assert max(len(re.sub(r"[`|]", "", line)) for line in text.splitlines() if line.startswith("| ")) <= longest


def anchors(text):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^##+ (.+)$", re.sub(r"(?s)```.*?```", "", text))
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_heading():
    pages = TEXTS | {"README.ja.md": JAPANESE}
    for page, text in pages.items():
        for other, anchor in re.findall(r"\]\(([\w.]*)#([^)]+)\)", text):
            assert anchor in anchors(pages[other or page]), f"{page}: {other}#{anchor}"


def test_every_file_in_the_texts_exists():
    text = README + SLIDES + GUIDE + MEASURED
    paths = re.findall(r"`((?:\w+/)?\w+\.(?:py|md|sh))`", text) + re.findall(r"\]\(([\w/.]+)\)", text)
    paths = [path for path in paths if "mine" not in path]  # the reader's own
    folders = (".", "parallel", "accounts", "ladder", "recovery")
    assert len(paths) > 50 and [p for p in paths if not any((HERE / f / p).exists() for f in folders)] == []


def test_the_readme_counts_the_lines_of_the_files_to_read():
    rows = re.findall(r"(?m)^\| `([\w/.]+)` \| (\d+) \|", README)
    lines = {path: (HERE / path).read_text("utf-8").count("\n") for path, _ in rows}
    assert len(rows) == 9 and all(int(said) == lines[path] for path, said in rows), lines
    about = int(re.search(r"nine files, about\s([\d,]+) lines", README)[1].replace(",", ""))
    assert abs(about - sum(lines.values())) <= 50, sum(lines.values())


def lines_of_code(text):
    """Return the number of lines with code: no blank lines, comments and docstrings."""
    lines, begins = set(), (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL):
            continue
        docstring = token.type == tokenize.STRING and before in begins
        if token.string.strip() and not docstring:
            lines |= {*range(token.start[0], token.end[0] + 1)}
        before = token.type
    return len(lines)


def test_lines_of_code():
    text = '"""A docstring\nof two lines."""\n\nimport os  # a comment\n\n\ndef f(x):\n    """Not code."""\n'
    assert lines_of_code(text + '    return """a string\n\n    of three lines"""\n') == 5


def processes_of(rung):
    return re.search(r"connect\((.+?)\)", (HERE / rung).read_text("utf-8"))[1]


def test_the_rungs_of_the_ladder():
    """All rungs of the main line, and their lines of code."""
    rows = re.findall(r"(?m)^\| [^|]+ \| `(rung\w+\.py)` \| ([^|]+) \| (\d+) \| [^|]+ \| `([\w.]+)` \|$", README)
    assert [path for path, *_ in rows] == sorted(path.name for path in (HERE / "ladder").glob("rung*.py"))[:12]
    for path, processes, said, _ in rows:
        assert processes_of(f"ladder/{path}") == processes, path
        found = lines_of_code((HERE / "ladder" / path).read_text("utf-8"))
        assert found == int(said), f"{path} has {found} lines of code"
    core = [path for path in HERE.rglob("*.py") if path.parent in (HERE, HERE / "parallel")]
    assert {name for *_, name in rows} <= set().union(*map(names_in, core))


SHORT_RUN = re.search(r'(?m)^short_run\(\) { (torchrun --nproc_per_node=)\$1 (.*?) --out_dir=\S+ "\${@:2}"; }$', SLIDES)


def slides(text):
    """Return [(slide, command, code and test)]."""
    found = re.findall(r"(?m)^\| ([^|`]+) \| `([^|`]+)`[^|]* \| ([^|]+) \|$", text)
    return [(slide.strip(), command, code) for slide, command, code in found if "; `" in code]


ROWS = slides(SLIDES)


def names_in(path):
    """Return a file's functions, classes and `Class.method`s."""
    names = set()
    for node in ast.parse((HERE / path).read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}.{n.name}" for n in getattr(node, "body", []) if isinstance(n, ast.FunctionDef)}
    return names


def in_full(command):
    """Return a command's words. `short_run N` is a function of the shell."""
    words = shlex.split(command)
    return [*shlex.split(f"{SHORT_RUN[1]}{words[1]} {SHORT_RUN[2]}"), *words[2:]] if words[0] == "short_run" else words


@pytest.mark.parametrize("slide, command, code", ROWS, ids=[row[0] for row in ROWS])
def test_the_map_names_existing_code_tests_and_commands(slide, command, code):
    """Each name exists in the file before it, the last file is a test, and the command is accepted."""
    path, found = None, 0
    for word in re.findall(r"`(.+?)`", code):
        if word.endswith(".py"):
            path = word
            assert (HERE / path).exists(), path
        else:
            assert word in names_in(path), f"{path} has no {word}"
            found += 1
    assert (found >= 1 or "`ladder/" in code) and Path(path).name.startswith("test_")
    program, *arguments = in_full(command)
    assert program in ("python", "torchrun")
    if program == "torchrun":
        check_ranks(arguments)


def check_ranks(arguments):
    """Fail unless train.py, or a rung of the ladder, can run on so many processes. arguments: of torchrun."""
    ranks = arguments.pop(0).partition("=")[2] if arguments[0].startswith("--nproc_per_node=") else "1"
    if arguments[0] == "train.py":
        config.check(config.load(arguments[1:]), int(ranks))
    else:
        assert ranks in processes_of(arguments[0])


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for _, command, _ in ROWS if command.startswith("python ")])
def test_a_command_of_the_map_runs(command):
    assert run(shlex.split(command), HERE)


TRAINING = re.findall(r"torchrun [^`\n]*train\.py[^`\n|#]*", GUIDE.replace("\\\n", " "))


@pytest.mark.parametrize(
    "command", [command for command in TRAINING if not re.search("--nnodes|train.py out/", command)]
)
def test_each_training_command_of_the_guide_is_accepted(command):
    check_ranks(shlex.split(command.partition(" && ")[0])[1:])


@pytest.mark.slow
def test_the_guides_walk_with_a_llama(tmp_path):
    """A random Llama goes to a checkpoint, trains three steps on four processes, and comes back as another one."""
    hf = pytest.importorskip("convert").transformers()
    write_llamas(tmp_path / "TinyLlama", "bpe")
    shutil.copyfile(HERE / "testing/japanese.txt", tmp_path / "text.txt")
    sizes = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, max_position_embeddings=32)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=1200, tie_word_embeddings=False)
    before = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads))
    before.save_pretrained(tmp_path / "TinyLlama")
    walk = re.search(r"```\n(python convert.py from_hf.*?)```", GUIDE, re.DOTALL)[1].replace("--train_iters=5000", "")
    for command in walk.splitlines():
        more = ["--train_iters=3", "--eval_iters=0"] if "train.py" in command else []
        run(shlex.split(command) + more, tmp_path)
    after = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "TinyLlama-ja")
    names = {name for name, p in after.named_parameters() if p.equal(before.state_dict()[name])}
    assert type(after) is type(before) and not names, f"not trained: {names}"
    vocabularies = [(tmp_path / folder / "tokenizer.json").read_bytes() for folder in ("TinyLlama", "TinyLlama-ja")]
    assert vocabularies[0] == vocabularies[1]


def test_the_readme_has_a_row_for_each_chapter_of_the_slides():
    """A chapter has eight rows at most. Its row names its anchor, its rungs (each file has a chapter) and a command."""
    assert len(ROWS) == int(re.search(r"SLIDES.md\) has (\d+) rows", README)[1])
    chapters = {f"{n}. {text}": slides(text) for n, text in enumerate(re.split(r"(?m)^## \d+\. ", SLIDES)[1:], 1)}
    rows = re.findall(r"(?m)^\| \[[^|]+\]\(SLIDES.md#(\S+)\)[^|]* \| ([-\d, to]+) \| `(.+)` \|$", README)
    assert all(len(rows_of_chapter) <= 8 for rows_of_chapter in chapters.values())
    for (chapter, found), (anchor, _, command) in zip(chapters.items(), rows, strict=True):
        assert {anchor} == anchors(f"## {chapter.splitlines()[0]}") and command in {words for _, words, _ in found}
    ranges = re.findall(r"(\d+)(?: to (\d+))?", ", ".join(rungs for _, rungs, _ in rows))
    rungs = {rung for first, last in ranges for rung in range(int(first), int(last or first) + 1)}
    assert rungs == {int(path.name[4:6]) for path in (HERE / "ladder").glob("rung*.py")}


def facts(text):
    """Return a page's links, the commands in its sentences, and its numbers without those of lines of code."""
    links = {link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith(("README", "SLIDES", "#"))}
    prose = re.sub(r"(?m)^\| `[\w/.]+` \|.*|about 2,300 lines", "", re.sub(r"(?s)```.*?```", "", text))
    commands = re.findall(r"`((?:python|pytest|torchrun|short_run|ADVERSARY=1) [^`]*)`", " ".join(prose.split()))
    return links, set(commands), set(re.findall(r"(?a)(?<![\w.,-])\d[\d,.]*\d(?!\w)", re.sub(r"`[^`]*`", "", prose)))


# README.ja.md also has SLIDES.md and these sections of GUIDE.md, in Japanese.
SECTIONS = "Add your own schedule", "Add your own optimizer"


def test_the_japanese_readme_has_the_same_commands_numbers_and_links():
    def names(rows):
        return [(command, re.findall("`(.+?)`", code)) for _, command, code in rows]

    blocks = re.compile(r"```\w*\n.*?```", re.DOTALL)
    sections = [re.search(rf"(?ms)^## {name}\n.*?(?=^## )", GUIDE)[0] for name in SECTIONS]
    english = "\n".join([README, SLIDES, *sections])
    assert JAPANESE.count("\n") <= 310 and names(slides(JAPANESE)) == names(ROWS)
    assert sorted(blocks.findall(JAPANESE)) == sorted(blocks.findall(english))
    (links, commands, numbers), ours = facts(JAPANESE), facts(english)
    assert ours[0] - links <= {f"GUIDE.md#{name.lower().replace(' ', '-')}" for name in SECTIONS}, ours[0] - links
    assert commands >= ours[1] and numbers >= ours[2], (ours[1] - commands, ours[2] - numbers)
    assert [command for command in commands - ours[1] if command not in " ".join(GUIDE.split())] == []
    assert [link for link in links - ours[0] if link not in GUIDE and link.partition("#")[0] != "GUIDE.md"] == []


# --- transcripts ------------------------------------------------------------------------------------------------------


def rows_of(file):
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


@pytest.mark.slow
def test_the_readmes_first_command_prints_the_shown_lines(tmp_path):
    """Run the README's first command without its pip, in a new folder: the same losses, and each line that is shown.

    The digits depend on the processor and on the version of Python, whose library is the data.
    """
    tests_only = ("OMP_NUM_THREADS", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in tests_only}
    environment["OMP_WAIT_POLICY"] = "passive"  # leaves its core to other tests
    command = re.search(r"\n.* pip install -r requirements.txt && (.*)\n```", README)[1]
    text = "".join(run(words.split(), tmp_path, env=environment) for words in command.split(" && "))
    ours, theirs = rows_of(tmp_path / "out/tiny/metrics.jsonl"), rows_of(HERE / "pictures/tiny.jsonl")
    for a, b in zip(ours, theirs, strict=True):
        assert a["iteration"] == b["iteration"] and abs(a["lm_loss"] - b["lm_loss"]) < 0.05 * b["lm_loss"]
    same = ours[-1]["lm_loss"] == theirs[-1]["lm_loss"]

    def masked(line):
        line = " ".join(TIME.sub("TIME", line).split())
        return line if same else re.sub(r"\d[\d.,E+-]*", "#", line)

    shown = re.search(r"```\n([^\n]*parameters, 4 layers.*?)\n```", README, re.DOTALL)[1]
    for line in shown.splitlines():
        parts = ".*".join(re.escape(masked(part)) for part in line.split("..."))
        assert any(re.fullmatch(parts, masked(other)) for other in text.splitlines()), f"no such line: {line}"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["SLIDES.md", "MEASURED.md"])
def test_the_tables_of_bytes(tmp_path, page):
    """Bytes do not depend on the machine."""
    text = TEXTS[page]
    command = re.search(r"```\n(torchrun --nproc_per_node=8 .*?)\n```", text.replace("\\\n", " "), re.DOTALL)
    words = shlex.split(command[1]) if command else in_full(re.search(r"(short_run [^`]+)` begins with", text)[1])
    run(["python", "prepare.py", "--tokenizer=bytes"], tmp_path)
    printed = run(words, tmp_path)
    shown = [*re.findall(r"(?s)((?:sent|kept) .{0,9}by rank 0\n.*?)\n(?:\n|```)", text)]
    assert len(shown) == (2 if command else 1) and all(table in printed for table in shown)
