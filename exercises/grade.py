"""Grade many folders: print a table that grows while you watch, or JSON."""

import json
from pathlib import Path

from tqdm import tqdm

from errors import UserError, reading


def grade(columns, one, folders, as_json=False):
    """Print a row for each of the folders. A folder that cannot be read has only a note.

    one(folder): returns a row {column: value}, also with keys that only JSON shows. A pair is shown as "5 of 6".
    """
    columns = ["folder", *columns, "note"]
    wide = [max(6, *map(len, folders)), *(max(len(name), 6) for name in columns[1:])]
    rows = []
    for folder in tqdm(folders, unit="folder", disable=None):
        try:
            with reading(folder, MemoryError):
                row = one(Path(folder)) if Path(folder).is_dir() else {"note": "no such folder"}
        except UserError as error:
            row = {"note": str(error)}
        rows.append({"folder": folder} | row)
        if not as_json:
            if len(rows) == 1:
                tqdm.write(line(columns, wide))
            tqdm.write(line([shown(rows[-1].get(name, "")) for name in columns], wide))
    if as_json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))


def shown(value):
    if isinstance(value, tuple):
        return f"{value[0]} of {value[1]}"
    return ", ".join(value) if isinstance(value, list) else str(value)


def line(cells, wide):
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, wide, strict=True)).rstrip()
