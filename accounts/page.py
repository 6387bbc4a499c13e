"""Write schedules, memory and messages of a rank as one HTML file with sliders: python -m accounts.page

The project's functions compute a row for each choice of the sliders. `page.html` draws the rows and adds bytes.
"""

import base64
import json
import sys
import zlib
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

from tqdm import tqdm

import config as configuration
from accounts import draw, ledger
from accounts.devices import DEVICES
from accounts.search import PLAIN, SEARCHED, table_of
from errors import UserError, exit_on_user_error, explained
from options import Parser
from parallel import schedules

FOLDER = Path(__file__).parent.parent
NAMES = (*schedules.SCHEDULES,)
CHOICES = dict(
    # options of draw.py
    name=NAMES,
    stages=(2, 3, 4, 6, 8),
    microbatches=(1, 2, 3, 4, 6, 8, 12, 16),
    chunks=(2, 3, 4),
    cost=("1,1,1", "2,1,1", "1,1.5,0.5"),
    comm=(0, 0.5),
    # fields of a configuration, and m, the micro-batches of a step
    model=("gpt3_1b3", "gpt3_13b", "gpt3_175b"),
    dp=(1, 4, 16),
    tp=(1, 2, 4, 8),
    pp=(1, 2, 4, 8),
    zero=(0, 1, 2, 3),
    sequence_parallel=(False, True),
    recompute=configuration.CHOICES["recompute"],
    micro_batch_size=(1, 2, 4, 8),
    schedule=NAMES,
    m=(8, 32),
)
STATES = ("parameters", "gradients", "master weights", "moments", "whole gradients", "whole parameters")
KINDS = draw.KINDS | {  # of boxes: meaning, colour
    "activations": ("activations, at their peak", "#f0e442"),
    "activations of a recomputed block": ("a block that is computed again", "#b5a642"),
    "whole gradients": ("whole gradients, before they are sharded", "#d55e00"),
    "whole parameters": ("whole parameters, gathered", "#0072b2"),
    "logits": ("logits", "#8a8f98"),
    "context": ("CUDA and NCCL (assumed)", "#c3c6cb"),
}
AXES = {  # of each table: a row depends on these choices
    "pictures": ("name", "stages", "microbatches", "chunks", "cost", "comm"),
    "states": ("model", "dp", "tp", "pp", "zero", "sequence_parallel", "schedule", "m"),
    "activations": ("model", "tp", "pp", "sequence_parallel", "recompute", "micro_batch_size", "schedule", "m"),
}


def pictures(name, chunks, **options):
    """Return [title, [(label, boxes) of a rank], notes] of `accounts.draw`. Few schedules have several chunks."""
    words = [f"--{option}={value}" for option, value in options.items()]
    return drawn(name, chunks if schedules.usual_chunks(name) > 1 else 1, *words)


@cache
def drawn(name, chunks, *words):
    options = draw.parse_arguments([name, f"--chunks={chunks}", *words])
    (picture,) = draw.pictures_of(options)
    rows = [[label, [short_box(box) for box in boxes]] for label, boxes, _ in picture.rows]
    return [picture.title, rows, picture.notes]


def short_box(box):
    return [round(box.start, 4), round(box.end, 4), box.text, *["pale"] * box.pale]


@cache
def table_named(name):
    return table_of(replace(configuration.load([f"{FOLDER}/configs/{name}.py"]), dtype="bf16"))


def ranks_of(wanted, model, m, dp=1, **fields):
    """Return [({part: bytes kept}, [(bytes sent, axis, what, operation, how often)])] of a layout's pipeline ranks.

    wanted: a function of a part that is kept, or of the column "how often" of what is sent.
    """
    facts = table_named(model)
    fields["chunks"] = schedules.usual_chunks(fields["schedule"])
    samples = fields.get("micro_batch_size", 1)
    c = replace(facts.config, **PLAIN | fields, global_batch_size=samples * m * dp)
    configuration.check(c, dp * c.tp * c.pp)
    layout = facts.layout(dp, *(getattr(c, name) for name in SEARCHED[:-1]))
    ranks, per = [], ledger.how_often(layout)
    for rank in range(c.pp):
        kept = {what: n for what, n in facts.on_gpu(c, layout, m, rank).items() if n and wanted(what)}
        sent = facts.sent(layout, m, samples, rank).items()
        ranks.append((kept, [(int(n), *row, ", ".join(per[row])) for row, (_, n) in sent if wanted(per[row])]))
    return ranks


def of_states(what):
    """Return whether ZeRO divides a part, or a message is that of a bucket or a step."""
    return what in STATES or "bucket" in what or what == ("step",)


def states(**choices):
    """Return what each rank keeps and sends because of its parameters."""
    return ranks_of(of_states, **choices)


def activations(**choices):
    """Return what else each rank keeps and sends."""
    return ranks_of(lambda what: not of_states(what), **choices)


def table(function):
    """Return (AXES, a row as JSON for each choice, in the order of `product`). A wrong choice has {"error": text}."""
    names, rows = AXES[function.__name__], []
    for values in tqdm([*product(*map(CHOICES.get, names))], desc=function.__name__, disable=None):
        try:
            row = function(**dict(zip(names, values, strict=True)))
        except UserError as error:
            row = {"error": str(error)}
        rows.append(json.dumps(row, separators=(",", ":")))
    return names, rows


def all_data():
    """Return the page's data. Each row is written once: a table has its number in `rows`."""
    rows, tables = {}, {}
    for function in (pictures, states, activations):
        names, texts = table(function)
        tables[function.__name__] = names, [rows.setdefault(text, len(rows)) for text in texts]
    return dict(
        choices={name: [*values] for name, values in CHOICES.items()},
        rows=[json.loads(text) for text in rows],
        tables=tables,
        kinds=KINDS,
        chunks={name: schedules.usual_chunks(name) for name in NAMES},
        capacity={name: DEVICES[name].memory_bytes for name in ("a100-40g", "a100-80g", "h200")},
    )


def page():
    """Return the HTML file as text."""
    packed = base64.b64encode(zlib.compress(json.dumps(all_data(), separators=(",", ":")).encode(), 9)).decode()
    return Path(__file__).with_suffix(".html").read_text("utf-8").replace("NUMBERS", packed, 1)


def main(arguments=None):
    """Write the page."""
    parser = Parser(prog="python -m accounts.page", allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="lecture.html", metavar="FILE", help="the page (default: lecture.html)")
    options = parser.parse_args(arguments)
    print("This takes about a minute.", file=sys.stderr)
    with explained(options.out):
        Path(options.out).write_text(text := page(), "utf-8")
    print(f"{options.out}: {len(text.encode()):,} bytes; open it in a browser")


if __name__ == "__main__":
    exit_on_user_error(main)
