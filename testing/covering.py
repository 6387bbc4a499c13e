"""Chooses the points of the grid that stand for the others: python -m testing.covering writes covering.txt.

Every run of the tests trains the points that a planted mistake of defects.txt names, and the fewest with each value of
each axis at which each changed formula of accounts/ledger.py and accounts/memory.py gives other bytes. No training is
needed to choose them. A slow run also trains the fewest that contain each pair of values. Run it after a new axis.
"""

import ast
import copy
import itertools
import random
import re
from pathlib import Path
from types import ModuleType

import numpy as np
from tqdm import tqdm

from accounts import ledger, memory
from model import unit_specs
from parallel import simulation
from parallel.layout import Layout
from testing import points
from testing.defects import DEFECTS

CANDIDATES = 300  # small points, among which those of every run are chosen
FUNCTIONS = {
    ledger: "predict_sent axis_sizes occasions_of letters_of_rank number_of_messages letters_of_bucket",
    memory: "sizes rank_states model_states whole_gradients operand_elements kept_by_chunk activations after_actions",
}


class Change(ast.NodeTransformer):
    """Changes node `number` of a formula: an integer, a comparison, or an operation, whose first operand is left."""

    def __init__(self, number):
        self.number = number

    def visit(self, node):
        node = super().generic_visit(node)
        match node:
            case ast.Constant(value=int() as value):
                after = ast.Constant(not value if isinstance(value, bool) else value + 1)
            case ast.Compare():
                after = ast.UnaryOp(ast.Not(), node)
            case ast.BinOp(left=after) | ast.BoolOp(values=[after, *_]) | ast.IfExp(body=after):
                pass
            case _:
                return node
        self.number -= 1
        return after if self.number == -1 else node


def changed(tree):
    """Yield the syntax tree with one change, for each change."""
    for number in itertools.count():
        change = Change(number)
        after = ast.fix_missing_locations(change.visit(copy.deepcopy(tree)))
        if change.number >= 0:
            return
        yield after


def changed_formulas():
    """Yield (the changed lines, ledger.py or memory.py with them)."""
    for file, names in FUNCTIONS.items():
        tree = ast.parse(Path(file.__file__).read_text("utf-8"))
        for i, part in enumerate(tree.body):
            for after in changed(part) if getattr(part, "name", "") in names.split() else ():
                before, lines = ast.unparse(part), ast.unparse(after).splitlines()
                text = " ".join([part.name, *(line for line in lines if line not in before)])
                yield text, loaded(file, ast.Module([*tree.body[:i], after, *tree.body[i + 1 :]], []))
    source = Path(ledger.__file__).read_text("utf-8")
    for line in (row.line for row in ledger.EVERY_ROW):
        *_, condition, elements, width = re.split("  +", line.strip())[:6]
        after = [line.replace(f" {width}", " wide" if width == "item" else " item")]
        for text in (condition, elements):
            after += [line.replace(text, ast.unparse(tree)) for tree in changed(ast.parse(text, mode="eval"))]
        for other in after:
            yield other, loaded(ledger, source.replace(line, other))


def loaded(file, source):
    module = ModuleType(file.__name__)
    exec(compile(source, file.__file__, "exec"), vars(module))
    return module


def tables(point, sent=ledger, kept=memory):
    """Return the predicted bytes of a point's pipeline ranks in bf16, with data rank 0 and the last one."""
    _, c = points.fitted(**point)
    dp, found = point["dp"] * point["cp"], []
    schedule = simulation.build(c.schedule, c.pp, c.global_batch_size // (c.micro_batch_size * point["dp"]), c.chunks)
    layout = Layout(c, dp, unit_specs(c), schedule)
    for rank in range(c.pp):
        found += [sent.predict_sent(layout, schedule, rank, data_rank, 2, 4) for data_rank in {0, dp - 1}]
        found.append(kept.predict_kept(layout, schedule, rank, kept.sizes(c, 2, 4, on_cpu=True)))
    return found


def notices(point, right, file):
    """Return whether a point's bytes are not `right` with the changed file."""
    try:
        return tables(point, **{"sent" if file.__name__ == ledger.__name__ else "kept": file}) != right
    except Exception:  # a changed formula may raise anything
        return True


def main():
    """Choose the points, write covering.txt, and print the changes that no candidate notices."""
    every = points.points()
    named = [i for i, point in enumerate(every) if any(f"[{points.name(point)}]" in d.test for d in DEFECTS)]
    small = [i for i, point in enumerate(every) if points.ranks(**point) <= 4]
    candidates = [*named, *random.Random(0).sample(small, CANDIDATES)]
    rights, changes = [tables(every[i]) for i in candidates], [*changed_formulas()]
    pairs = zip(tqdm(candidates), rights, strict=True)
    found = np.array([[notices(every[i], right, file) for _, file in changes] for i, right in pairs])
    values = points.sets_of([every[i] for i in candidates], 1)
    quick = [candidates[i] for i in points.cover(np.concatenate([found, values], 1), [*range(len(named))])]
    slow = points.cover(points.sets_of(every, 2), quick)[len(quick) :]
    head = "Written by testing/covering.py: points of every run, and of a slow run"
    names = ("\n".join(points.name(every[i]) for i in part) for part in (quick, slow))
    points.FILE.write_text("\n\n".join([head, *names]) + "\n")
    unnoticed = [text for (text, _), noticed in zip(changes, found.any(0), strict=True) if not noticed]
    print("No candidate notices:", *unnoticed, sep="\n")


if __name__ == "__main__":
    main()
