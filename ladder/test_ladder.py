"""Every rung has the losses of rung 1, and sends and keeps what its card says. This finds students' mistakes:

    rung  mistake                                         what happens
    02    a part's loss is the mean of the part           the losses are m times as large; Adam divides it away
    03    no requires_grad_                               an error: the loss has no graph
          no torch.no_grad                                an error: x.grad is None, because x has a graph
    04    no AllReduce                                    step 2 is wrong
          the loss is the mean of the rank's samples      the losses are n times as large; Adam divides it away
    05    no wait                                         step 2 is wrong, in each run by another amount
          register_hook instead                           an error: w.grad does not exist yet
    06    part [0] on each rank                           step 2 is wrong
          no AllGather                                    step 2 is wrong
    07    w.shard.grad = part instead of the sum          step 2 is wrong
          w.grad stays                                    step 2 is wrong: backward adds the next part to it
    08    no gather before backward                       an error: storage of size 0
          the shard is a view (no clone)                  the process dies: the shard was freed with the weight
    09    no requires_grad_                               an error: x.grad is None
          no wait for the sends                           a hang: Gloo drops a message without a Python object
    10    send instead of isend, in F and in B            a hang: two ranks send, and wait for each other's recv
          warmup = rank                                   a hang: rank 0 waits for B before it has sent F1
    11    f without AllReduce (tp_mlp.py)                 step 2 is wrong, but the loss falls
          each rank has the bias (tp_mlp.py)              step 1 is wrong: g adds it n times
    12    AllReduce without the DP group                  an error or a hang: tensors of different sizes
          no cut of the samples                           the losses are twice as large; Adam divides it away
    13    no tags                                         an error or a wrong step 1: a message of the other chunk
          warmup = n - 1 - rank                           an error (KeyError): B of a chunk comes before its F
    14    w.grad at the newest weights                    step 2 is wrong: B is not that of F
    15    the twins are not added                         step 2 is wrong
          both twins begin with `down`                    an error or a wrong step 2
    16    w.grad = dw instead of the sum                  step 2 is wrong
          W before I in the list                          an error: I has left no work yet
    17    no AllReduce of replicated weights              step 2 is wrong: the copies of a LayerNorm differ
          AllGather's backward without the sum            step 2 is wrong, but the loss falls
    18    z_target without `local`                         step 1 is wrong; the loss falls below the true one
          the maximum without AllReduce                   step 1 is wrong
    19    no AllReduce over the copies                    step 2 is wrong
    20    AllReduce of the experts' gradients, too        an error or a wrong step 2: ranks have other experts
          no p_e in the output                            an error: the router has no gradient
    21    step=1 in backward, too                         step 2 is wrong for n > 2: the gradients go to a wrong rank
          i == 0 without `future`                         step 1 is wrong, too small: tokens see the next one
    22    |g_r - g|^2 / 2n instead of the product         step 2 is right (see the card), but it costs more memory
          g_r - g without detach, in the product          step 2 is wrong: one more second derivative
          without the factor n                            step 2 is wrong

After a minute of waiting a rank stops, and its error names the line. The test makes the mistakes of `MISTAKES`.
A rung runs as it is, in the processes of testing/workers.py. The test replaces `connect` and `show` of gpt.py, and
counts what the calls of torch.distributed send.
"""

import contextlib
import gc
import os
import re
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

import train
from config import Config
from testing.tiny import built, few, slow

LADDER = Path(__file__).parent
RUNGS = {path.stem: path.read_text("utf-8") for path in sorted([*LADDER.glob("rung*.py"), LADDER / "tp_mlp.py"])}
ALLOWED = {name: re.search(r"connect\(([\d, ]+)", text)[1].split(",") for name, text in RUNGS.items()}
SENT = {  # the numbers that each of n ranks sends; x: the first argument of the call
    "all_reduce": lambda x, n, *_: 2 * (n - 1) * x.numel() // n,
    "reduce_scatter": lambda x, n, *_: (n - 1) * x.numel(),
    "all_gather": lambda x, n, *_: (n - 1) * x[0].numel(),
    "isend": lambda x, n, *_: x.numel(),
    "all_to_all_single": lambda y, n, x, of, to: sum(to[r] for r in range(n) if r != dist.get_rank()) * x[:1].numel(),
}
ACTIVATIONS = {  # (rung, with whose activations it is compared, their share on rank r of n)
    "rung02_micro_batches": ("rung01_one_process", lambda r, n: 1 / 4),
    "rung04_dp": ("rung01_one_process", lambda r, n: 1 / n),
    "rung10_1f1b": ("rung09_gpipe", lambda r, n: (n - r) / 4),
}
STEPS = 3  # not gpt.py's 5. Adam's first update has only signs, so wrong sizes show in the third loss
MISTAKES = [
    ("rung04_dp", "(model(ids), targets)", "(model(ids), targets) * n"),
    ("rung06_zero1", "[rank]  #", "[0]  #"),
    ("rung07_zero2", "part if w.shard.grad is None else w.shard.grad + part", "part"),
    ("tp_mlp", "dist.all_reduce(dx, group=ctx.group)", "pass"),
    ("tp_mlp", "if dist.get_rank(group) > 0:", "if False:"),
    ("rung15_chimera", "dist.all_reduce(w.grad, group=twins)", "pass"),
    ("rung19_hybrid_sharding", "dist.all_reduce(w.shard.grad, group=copies)", "pass"),
    ("rung20_experts", "if n > 1 and id(w) not in experts:", "if True:"),
    ("rung21_ring_attention", "total = torch.logaddexp(L, part_L)", "total = torch.maximum(L, part_L)"),
    ("rung22_gradient_variance", "(n * part.detach() - w.grad)", "(part.detach() - w.grad)"),
]


def size(tensors):
    """Return the bytes of these tensors, shared memory once."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def activations(peak):
    """Return a context in which `peak` gets the bytes that autograd keeps for backward."""
    alive = weakref.WeakSet()

    def pack(x):
        kept = partial(torch.detach, x.detach())  # it can be in a set
        if x.is_floating_point() and x.dim() and Parameter not in (type(x), type(x._base)):
            alive.add(kept)
            peak.append(size(kept() for kept in alive))
        return kept

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept())


def run_rung(name, old="\n", new="\n", change=lambda model: model):
    """Run a rung on this rank. Return its losses and bytes: (sent in a step, kept, the most of activations, of whole
    weights, of whole gradients).

    old, new: a text of the rung, and what replaces it. change: gets the model, and returns it.
    """
    losses, sent, updates, kept, names = [], [], [], [], {"__name__": "__main__"}
    peak, whole, gradients = [0], [0], [0]
    place = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    others = [x for x in gc.get_objects() if type(x) is Parameter]  # an earlier test's, alive in this process

    def counting(call, numbers):
        def count(x, *arguments, group=None, **more):
            sent.append(8 * numbers(x, dist.get_world_size(group), *arguments))
            weights = list(names["model"].parameters()) if isinstance(names.get("model"), torch.nn.Module) else []
            whole.append(size(weights))
            gradients.append(size(w.grad for w in weights if w.grad is not None))
            return call(x, *arguments, group=group, **more)

        return count

    def step(adam):
        updates.append(adam)
        if len(updates) == 2:
            mine = [x for x in gc.get_objects() if type(x) is Parameter and all(x is not y for y in others)]
            tensors = mine + [x for state in adam.state for x in state]
            kept.append(size(tensors + [x.grad for x in tensors if x.grad is not None]))
        update(adam)

    watched = name in {*ACTIVATIONS, *(other for other, _ in ACTIVATIONS.values())}
    with pytest.MonkeyPatch.context() as patch, activations(peak) if watched else contextlib.nullcontext():
        try:
            import gpt

            gpt.STEPS = STEPS
            torch.set_default_dtype(torch.float64)
            GPT, update = gpt.GPT, gpt.Adam.step
            patch.setattr(gpt, "GPT", lambda: change(GPT()))
            patch.setattr(gpt, "connect", lambda *_: place)
            patch.setattr(gpt, "show", lambda loss: losses.append(loss.item()))
            patch.setattr(gpt.Adam, "step", step)
            for call, numbers in SENT.items():
                patch.setattr(dist, call, counting(getattr(dist, call), numbers))
            assert old in RUNGS[name]
            exec(compile(RUNGS[name].replace(old, new), name, "exec"), names)
        finally:
            names.clear()  # for the next run
            gc.collect()
            torch.set_default_dtype(torch.float32)
            for module in {"gpt", *RUNGS} & {*sys.modules}:
                del sys.modules[module]
    return losses, (sum(sent) // STEPS, *kept, max(peak), max(whole), max(gradients))


def run_all(workers, n, name, *mistake):
    """Return the sums of n ranks' losses, and each rank's bytes."""
    losses, counts = zip(*workers.run(n, run_rung, name, *mistake), strict=True)
    return [sum(parts) for parts in zip(*losses, strict=True)], counts


@pytest.fixture(scope="module")
def one_process(workers):
    return run_all(workers, 1, "rung01_one_process")


SIZES = [(name, int(n)) for name in RUNGS for n in sorted(ALLOWED[name], key=lambda n: int(n) != 2)]
FIRST = dict(reversed(SIZES))  # {rung: 2 processes, or the number that it can have}


@pytest.mark.parametrize("name, n", [size if FIRST[size[0]] == size[1] else slow(size) for size in SIZES])
def test_a_rung_has_the_losses_of_one_process_and_the_bytes_of_its_card(workers, one_process, name, n):
    losses, counts = run_all(workers, n, name)
    assert losses == pytest.approx(right_losses(workers, one_process, name, n), rel=1e-10)
    pairs = re.findall(r"([\d,]+) bytes(?: \(n=4: ([\d,]+)\))?", RUNGS[name])
    sizes = [int((pair[n == 4] or pair[0]).replace(",", "")) for pair in pairs]
    assert list(counts[0][:2]) == [0] * (n == 1) + sizes or (n == 1 and name in OTHERS)
    if name in ACTIVATIONS:
        other, share = ACTIVATIONS[name]
        full = one_process[1] * n if other == "rung01_one_process" else run_all(workers, n, other)[1]
        assert [c[2] for c in counts] == [full[r][2] * share(r, n) for r in range(n)]
    assert name != "rung08_zero3" or max(c[3] for c in counts) == 12_704 * 8  # the weights of one block
    assert name != "rung07_zero2" or max(c[4] for c in counts) == 4_096 * 8  # the gradient of fc1.weight


@pytest.mark.parametrize("name, right, wrong", few(MISTAKES))
def test_a_mistake_shows(workers, one_process, name, right, wrong):
    losses, _ = run_all(workers, n := FIRST[name], name, right, wrong)
    assert losses != pytest.approx(right_losses(workers, one_process, name, n), rel=1e-4)


def right_losses(workers, one_process, name, n):
    """Return the losses of one process with what the rung has: rung 1's, or of another model or rule (OTHERS)."""
    return workers.run(1, of_another, name, n)[0] if name in OTHERS else one_process[0]


def of_another(name, n):
    import gpt

    gpt.STEPS = STEPS
    torch.set_default_dtype(torch.float64)
    losses = OTHERS[name](gpt, n)
    torch.set_default_dtype(torch.float32)
    return losses


def with_experts(gpt, n):
    """Return the losses of rung 20's model on one process: every expert computes every token, and a mask chooses."""
    model, losses = gpt.GPT(), []
    for block in (unit for unit in model if isinstance(unit, gpt.Block)):
        block.router = torch.nn.Linear(gpt.HIDDEN, 4, bias=False)
        fc1, fc2 = torch.nn.Linear, torch.nn.Linear
        pairs = [(fc1(gpt.HIDDEN, 4 * gpt.HIDDEN), fc2(4 * gpt.HIDDEN, gpt.HIDDEN)) for _ in range(4)]
        block.experts = torch.nn.ModuleList(linear for pair in pairs for linear in pair)
        del block.fc1, block.fc2

        def mlp(x, block=block):
            p, y = block.router(x).softmax(-1), 0
            for e, (fc1, fc2) in enumerate(zip(block.experts[::2], block.experts[1::2], strict=True)):
                chosen = (p.argmax(-1) == e) * p[..., e]
                y = y + chosen[..., None] * fc2(torch.nn.functional.gelu(fc1(x), approximate="tanh"))
            return y

        block.mlp = mlp
    adam = gpt.Adam(model.parameters())
    for ids, targets in gpt.batches():
        loss = gpt.cross_entropy(model(ids), targets)
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


def with_a_penalty(gpt, n):
    """Return the losses of rung 22 on one process: autograd differentiates the whole variance of n parts' gradients."""
    model, losses = gpt.GPT(), []
    weights = list(model.parameters())
    adam = gpt.Adam(weights)
    for ids, targets in gpt.batches():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            pairs = zip(ids.chunk(n), targets.chunk(n), strict=True)
            parts = [n * gpt.cross_entropy(model(x), y) for x, y in pairs]
            grads = [torch.autograd.grad(part, weights, create_graph=True) for part in parts]
        mean = [sum(g) / n for g in zip(*grads, strict=True)]
        variance = sum(((g - m) ** 2).sum() for of in grads for g, m in zip(of, mean, strict=True)) / n
        loss = sum(parts) / n
        (loss + 0.1 / 2 * variance).backward()
        adam.step()
        losses.append(loss.item())
    return losses


def with_old_weights(gpt, n):
    """Return PipeDream's losses on one process: on rank r of n, micro-batch j uses weights n-1-r updates old."""
    model, versions, losses = gpt.GPT(), [], []
    adam = gpt.Adam(model.parameters())
    for ids, targets in gpt.batches():
        losses.append(0.0)
        for x, y in zip(ids.chunk(gpt.MICRO_BATCHES), targets.chunk(gpt.MICRO_BATCHES), strict=True):
            versions.append({name: w.detach().clone() for name, w in model.named_parameters()})
            delays = {name: n - 1 - int(name.partition(".")[0]) * n // 8 for name in versions[0]}
            old = {name: versions[max(0, len(versions) - 1 - delay)][name] for name, delay in delays.items()}
            weights = {name: w.clone().requires_grad_() for name, w in old.items()}
            loss = gpt.cross_entropy(torch.func.functional_call(model, weights, x), y)
            loss.backward()
            for name, w in model.named_parameters():
                w.grad = weights[name].grad
            adam.step()
            losses[-1] += loss.item()
    return losses


OTHERS = {
    "rung14_pipedream": with_old_weights,
    "rung20_experts": with_experts,
    "rung22_gradient_variance": with_a_penalty,
}


def program_and_ladder():
    """Return the losses of `train_step`, and of rung 1 with its weights and one word table (tied)."""
    import gpt

    torch.set_default_dtype(torch.float32)
    config = Config(
        num_layers=gpt.LAYERS, hidden_size=gpt.HIDDEN, num_attention_heads=gpt.HEADS, seq_length=gpt.SEQ,
        vocab_size=gpt.VOCAB, global_batch_size=gpt.BATCH, micro_batch_size=gpt.BATCH, train_iters=STEPS,
        lr=0.01, lr_decay_style="constant", weight_decay=0.0, clip_grad=0.0, init_method_std=0.2, dtype="fp64",
    )  # fmt: skip
    run = built(config)
    weights = {p.spec.name: p.detach().clone() for p in run.model.parameters()}
    batches = (run.model.micro_batch(ids, targets) for ids, targets in gpt.batches())
    program = [train.train_step(run, batches).read().loss for _ in range(STEPS)]
    ends = {"0.word.weight": "word.weight", "0.position.weight": "embedding.position", "7.1.weight": "word.weight"}

    def with_these_weights(model):
        for name, p in model.named_parameters():
            unit, _, rest = name.partition(".")
            w = weights[ends.get(name) or (f"head.ln.{rest[2:]}" if unit == "7" else f"block{int(unit) - 1}.{rest}")]
            if "qkv" in name:  # the program's rows: q, k, v, in each the heads; the ladder's: heads, in each q, k, v
                w = w.unflatten(1, (gpt.HEADS, -1)).transpose(0, 1)
            p.data.copy_(w.reshape(p.shape))
        model[-1][1].weight = model[0].word.weight
        return model

    return program, run_rung("rung01_one_process", change=with_these_weights)[0]


def test_the_program_trains_the_same_model(workers):
    program, ladder = workers.run(1, program_and_ladder)[0]
    assert ladder == pytest.approx(program, rel=1e-10)


def test_another_number_of_processes_is_one_line():
    done = subprocess.run([sys.executable, LADDER / "rung04_dp.py"], capture_output=True, text=True)
    line = r"error: nproc_per_node=1: \S+rung04_dp.py needs 2 or 4\n"
    assert done.returncode == 2 and re.fullmatch(line, done.stderr)


@pytest.mark.slow
def test_torchrun_adds_no_lines_to_it():
    done = torchrun(2, "rung01_one_process.py")
    assert done.returncode == 0 and done.stdout == "" and "error: nproc_per_node=2: " in done.stderr.splitlines()[-1]


def torchrun(n, *words):
    command = [sys.executable, "-m", "torch.distributed.run", "--local-addr=localhost", f"--nproc_per_node={n}", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=LADDER, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_with_delayed_messages_overlap_waits_less():
    """Rung 4 waits for each of its 76 sums. Rung 5 computes meanwhile."""
    dp, overlap = (torchrun(2, "delay.py", "10", f"rung{rung}.py").stdout for rung in ("04_dp", "05_overlap"))
    (*losses, dp), (*others, overlap) = dp.splitlines(), overlap.splitlines()
    waits = [int(re.fullmatch(r"waited (\d+) ms in a step", line)[1]) for line in (dp, overlap)]
    assert losses == others and waits[0] >= 76 * 10 > waits[1]
