"""Write schedules and the memory of a rank as one HTML file with sliders: python -m accounts.page --out=lecture.html

Actions, bytes, formulas and errors come from the project's functions. `page.html` draws them.
"""

import base64
import json
import zlib
from dataclasses import replace
from functools import cache, wraps
from itertools import product
from pathlib import Path

import config as configuration
from accounts import bubbles, memory, meta
from accounts.devices import DEVICES
from accounts.search import RESERVED, SHORT, has_head, model_of
from errors import UserError, exit_on_user_error, explained, reading
from options import Parser
from parallel import schedules, simulation

FOLDER = Path(__file__).parent.parent
MODELS = ("gpt3_1b3", "gpt3_13b", "gpt3_175b")
AXES = {  # choices of the two views
    **dict(name=[*schedules.SCHEDULES], p=(2, 3, 4, 6, 8), m=range(1, 17), v=(2, 3, 4)),
    **dict(model=MODELS, dp=(1, 2, 4, 8, 16), tp=(1, 2, 4, 8), pp=(1, 2, 4, 8), b=(1, 2, 4, 8), micro=(4, 8, 16, 32)),
    **dict(schedule=list(schedules.SCHEDULES)),
    **dict(sp=(0, 1), recompute=configuration.CHOICES["recompute"], zero=range(4), copies=(1, 2, 4, 8)),
}
LEAST = SHORT | {"gpipe": (1, 2), "chimera": (1, 2)}  # for whole gradients


def or_error(function):
    """Return `function` with a cache. It returns a UserError as {"error": text}."""

    @cache
    @wraps(function)
    def tried(**values):
        try:
            with reading(str(values)):
                return function(**values)
        except UserError as error:
            return {"error": str(error)}

    return tried


@or_error
def lists(name, p, m, v):
    """Return [parts, placement, [(kind, micro-batch, chunk, steps back to each action that it waits for ...)]]."""
    s = simulation.build(name, p, m, v if schedules.usual_chunks(name) > 1 else 1)
    order = [event.action for event in simulation.run_in_order(s, simulation.NOMINAL, 0)]
    at, needs = {action: i for i, action in enumerate(order)}, simulation.prerequisites(s)
    waits = [[at[action] - at[need] for need in needs[action]] for action in order]
    return s.parts, s.placement, [("FBIWU".index(a.kind), *a[1:], *w) for a, w in zip(order, waits, strict=True)]


@cache
def model_named(name):
    return model_of(replace(configuration.load([f"{FOLDER}/configs/{name}.py"]), dtype="bf16"))


@cache
def checked(model, tp, pp, schedule, m):
    """Return the first fields of `Model.layout`."""
    fields = dict(tp=tp, pp=pp, schedule=schedule, chunks=schedules.usual_chunks(schedule))
    c = replace(model_named(model).config, **fields, micro_batch_size=1, global_batch_size=m)
    configuration.check(c, tp * pp)
    return fields.values()


@cache
def first_with_the_padding(model, tp, dp):
    """Return the first n > 1 with buckets as large as those of dp."""
    sizes = {n: [bucket.size for bucket in model_named(model).buckets(tp, n).values()] for n in (*AXES["dp"], dp)}
    return next((n for n in AXES["dp"] if n > 1 and sizes[n] == sizes[dp]), dp)


@or_error
def states(dp, **numbers):
    """Return [P, 1 on a rank with the head, bytes of whole gradients, of whole parameters] of each pipeline rank."""
    model, fields, m = model_named(numbers["model"]), checked(**numbers), numbers["m"]
    if (same := first_with_the_padding(numbers["model"], numbers["tp"], dp)) != dp:
        return states(dp=same, **numbers)
    layout, rows = model.layout(dp, *fields, 3, False, "none"), []
    for rank in range(numbers["pp"]):
        bytes_kept = model.on_gpu(layout.config, layout, m, rank)
        whole = bytes_kept.get("whole gradients", 0), bytes_kept["whole parameters"]
        rows.append([memory.stored(layout, rank), int(has_head(layout, rank)), *whole])
    return rows


@or_error
def activations(sp, recompute, **numbers):
    """Return [bytes, perhaps those of a recomputed block] of each pipeline rank, for b = 1."""
    model, fields, m = model_named(numbers["model"]), checked(**numbers), numbers["m"]
    layout = model.layout(1, *fields, 0, bool(sp), recompute)
    return [[*model.activations(layout, m, rank).values()] for rank in range(numbers["pp"])]


@or_error
def shards(dp, zero, copies):
    """Return the number of ranks that divide a bucket."""
    c = replace(model_named(MODELS[0]).config, zero=zero, zero_copies=copies, micro_batch_size=1, global_batch_size=dp)
    configuration.check(c, dp)
    return dp // copies if zero else 1


@or_error
def flight(schedule, pp, m):
    """Return [v, [peak in flight of each rank]]."""
    s = simulation.build(schedule, pp, m, schedules.usual_chunks(schedule))
    return (max(s.parts) + 1) // pp, bubbles.simulate(s, simulation.NOMINAL).peak


@or_error
def logits(model, tp, b):
    facts = model_named(model)
    layout = facts.layout(1, tp, 1, "1f1b", 1, 0, False, "none")
    return facts.on_gpu(replace(layout.config, micro_batch_size=b), layout, 1, 0)["logits"]


@or_error
def blocks(model, tp, sp, recompute):
    c = replace(model_named(model).config, tp=tp, sequence_parallel=bool(sp), recompute=recompute)
    return {"Korthikanti's table in memory.py": meta.work_of(replace(c, micro_batch_size=1), 2)["block"].saved}


TABLES = {
    lists: "name p m v",
    states: "model tp pp schedule micro dp",
    activations: "model tp pp schedule micro sp recompute",
    flight: "pp schedule micro",
    shards: "dp zero copies",
    logits: "model tp b",
    blocks: "model tp sp recompute",
}


def javascript_row(function, **values):
    """Return a function's value as JSON. Few micro-batches have the peaks of many."""
    if "micro" in values:
        micro = values.pop("micro")
        rounds, extra = (LEAST if function is states else SHORT).get(values["schedule"], (micro, 0))
        values["m"] = min(micro, rounds * values["pp"] + extra)
    return json.dumps(function(**values), separators=(",", ":"))


def all_data():
    """Return the page's data. A table has a place in `rows` for each choice, in the order of `product`."""
    rows, tables = {}, {}
    for function, axes in TABLES.items():
        names = axes.split()
        chosen = (dict(zip(names, values, strict=True)) for values in product(*map(AXES.get, names)))
        texts = [javascript_row(function, **values) for values in chosen]
        tables[function.__name__] = names, [rows.setdefault(text, len(rows)) for text in texts]
    whole = memory.model_states(1, 2, 0)  # {part: bytes per element}
    begins = {w: next(z for z in (1, 2, 3) if memory.model_states(1, 2, z)[w] < whole[w]) for w in whole}
    facts = {}
    for name in MODELS:
        c = model_named(name).config
        facts[name] = dict(h=c.hidden_size, L=c.num_layers, s=c.seq_length, N=model_named(name).parameters)
    return dict(
        axes={name: [*values] for name, values in AXES.items()},
        rows=[json.loads(text) for text in rows],
        tables=tables,
        chunks={name: schedules.usual_chunks(name) for name in schedules.SCHEDULES},
        formulas=bubbles.FORMULAS,
        states={part: [int(width), begins[part]] for part, width in whole.items()},
        models=facts,
        capacity={name: DEVICES[name].memory_bytes for name in ("a100-40g", "a100-80g", "h200")},
        reserved=RESERVED,
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
    with explained(options.out):
        Path(options.out).write_text(text := page(), "utf-8")
    print(f"{options.out}: {len(text.encode()):,} bytes; open it in a browser")


if __name__ == "__main__":
    exit_on_user_error(main)
