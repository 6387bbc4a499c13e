#!/usr/bin/env bash
# Tokenize on N nodes under Slurm, from the folder of prepare.py. Here N is 64:
#
#     sbatch --array=0-63 --cpus-per-task=32 --time=4:00:00 jobs/prepare.sh 64 data/web texts/ --tokenizer=gpt2
#     jobs/prepare.sh 64 data/web      # when all tasks have ended: joins their parts
#
# Task i writes part i, data/web.i: a share of the files (a file is not divided) with the options of prepare.py. If a
# task stops, submit the same array again: it resumes there, and leaves finished parts alone. The joined files are those
# of one prepare.py on all files, byte for byte (but it does not fill an empty split from another one).
#SBATCH --job-name=prepare
#SBATCH --nodes=1
#SBATCH --ntasks=1

# The lines of your cluster.
# source .venv/bin/activate

set -e
[ $# -ge 2 ] || { echo "usage: jobs/prepare.sh N OUT [INPUT ... --field=value ...]" >&2 && exit 2; }
n=$1 out=$2
shift 2
if [ -n "$SLURM_ARRAY_TASK_ID" ]; then
    exec python prepare.py "$@" --part="$SLURM_ARRAY_TASK_ID/$n" --out="$out.$SLURM_ARRAY_TASK_ID"
fi
for ((i = 0; i < n; i++)); do
    if [ ! -e "$out.$i/meta.json" ]; then
        echo "error: $out.$i is not finished; submit the array again" >&2
        exit 2
    fi
done
if [ -e "$out.$n" ]; then
    echo "error: $out.$n is there, so the array had more than $n parts" >&2
    exit 2
fi
if [ -e "$out" ]; then
    echo "error: $out is there already; remove it, or name another folder" >&2
    exit 2
fi
rm -rf "$out.joining"
cp -r "$out.0" "$out.joining" # with the vocabulary
for ((i = 1; i < n; i++)); do
    for split in train val test; do
        cat "$out.$i/$split.bin" >>"$out.joining/$split.bin"
    done
done
python - "$out" "$n" <<'END'
import json, sys
from pathlib import Path

out, n = sys.argv[1], int(sys.argv[2])
metas = [json.loads(Path(f"{out}.{i}/meta.json").read_text()) for i in range(n)]
for i, meta in enumerate(metas):
    for name in ("tokenizer", "split", "text_key"):
        if meta["made_from"][name] != metas[0]["made_from"][name]:
            why = f"{out}.{i} has another --{name} than {out}.0; remove it, and submit the array again"
            print(f"error: {why}", file=sys.stderr)
            sys.exit(2)
    for split, count in meta["tokens"].items():
        size = Path(f"{out}.{i}/{split}.bin").stat().st_size
        if 8 * size != int(meta["dtype"].removeprefix("uint")) * count:
            why = f"{out}.{i}/{split}.bin should have {count:,} tokens; remove {out}.{i}, and submit the array again"
            print(f"error: {why}", file=sys.stderr)
            sys.exit(2)
inputs = [meta["made_from"]["input"] for meta in metas]
made_of = {"files": sum(i["files"] for i in inputs), "bytes": sum(i["bytes"] for i in inputs), "parts": n}
joined = metas[0] | {name: sum(meta.get(name, 0) for meta in metas) for name in ("skipped", "unknown")}
joined["made_from"] = metas[0]["made_from"] | {"input": made_of}
for name in ("tokens", "documents"):
    joined[name] = {split: sum(meta[name][split] for meta in metas) for split in metas[0][name]}
if sum(joined["tokens"].values()) == sum(joined["documents"].values()):  # only end-of-text tokens
    print(f"error: the parts of {out} have no text", file=sys.stderr)
    sys.exit(2)
Path(f"{out}.joining/meta.json").write_text(json.dumps(joined, indent=1))
for split, count in joined["tokens"].items():
    print(f"{split:<5} {count:>16,} tokens {joined['documents'][split]:>12,} documents")
END
mv "$out.joining" "$out"
echo "joined $n parts; you may remove $out.[0-9]*"
