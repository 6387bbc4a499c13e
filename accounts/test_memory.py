"""Bytes kept by a rank equal the formulas exactly: model states in every stage, and activations.

The grid (test_layouts.py) compares all rows in all kinds of layouts. Here they equal numbers by hand, and all that
lives.
"""

import contextlib
import gc

import pytest
import torch

import train
from accounts import memory, meter, report, zero_states
from parallel.mesh import Mesh
from testing.compare import same_rows
from testing.record import parameters, record
from testing.tiny import built, tiny_batches, tiny_config

# --- model states -----------------------------------------------------------------------------------------------------

# ZeRO, Table 1: GB (1e9 bytes) per device, {dp: {parameters: stages 1, 2, 3}}. The paper truncates or rounds.
TABLE_1 = {
    1: {7.5e9: (120, 120, 120), 1e12: (16000, 16000, 16000)},
    4: {7.5e9: (52.5, 41.3, 30), 1e12: (7000, 5500, 4000)},
    16: {7.5e9: (35.6, 21.6, 7.5), 1e12: (4750, 2875, 1000)},
    64: {7.5e9: (31.4, 16.6, 1.88), 1e12: (4187, 2218, 250)},
    256: {7.5e9: (30.4, 15.4, 0.47), 1e12: (4046, 2054, 62.5)},
    1024: {7.5e9: (30.1, 15.1, 0.12), 1e12: (4011, 2013, 15.6)},
}


def test_zeros_table_1():
    for n, rows in TABLE_1.items():
        for elements, cells in rows.items():
            for stage, cell in enumerate(cells, start=1):
                exact = sum(zero_states.model_states(int(elements), n, stage, gradients=2).values()) / 10**9
                unit = 10 ** len(str(cell).partition(".")[2])  # 10 to the power of the paper's number of decimals
                assert round(cell * unit) in (int(exact * unit), int(exact * unit + 0.5)), (n, elements, stage)


@contextlib.contextmanager
def newly_alive():
    """Yield `alive`, for the tensors made in the `with` block."""
    gc.freeze()  # hides older objects from gc.get_objects()
    try:
        yield alive
    finally:
        gc.unfreeze()


def alive():
    """Return {storage: bytes} of floating-point tensors with more than 12 elements."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu"]
    tensors = [x for x in tensors if x.is_floating_point() and x.numel() > 12]
    return {meter.storage_id(x): x.untyped_storage().nbytes() for x in tensors}


def predicted(run):
    sizes = zero_states.sizes(run.config, run.zero.dtype.itemsize, run.zero.master_dtype.itemsize, on_cpu=True)
    return memory.predict_kept(run.layout, run.executor.training_schedule, run.mesh.pp.rank, sizes)


def started(config, mesh=None):
    run = built(config, mesh)
    return run, tiny_batches(run)


def check_states(configs):
    """Before the first step and after it, each row equals its formula. After it, no other tensor lives."""
    mesh = Mesh.of(configs[0])
    for config in configs:
        with newly_alive() as alive:
            run, batches = started(config, mesh)
            where = f"{config.dtype} {config.optimizer} zero={config.zero}"
            expected = {what: n for what, n in predicted(run).items() if what in meter.STATES}
            same_rows(f"{where}, before the first step", meter.measured_states(run.zero), expected)
            train.train_step(run, batches)
            run.rates = None  # the table of learning rates
            same_rows(where, meter.measured_states(run.zero), expected)
            every = "all tensors that live"
            same_rows(where, {every: sum(alive().values())}, {every: sum(expected.values())})


@pytest.mark.parametrize("dp", [1, 3])
def test_model_states_equal_the_formulas(workers, dp):
    numbers = [("fp64", "sgd"), ("fp32", "adamw"), ("bf16", "adamw")]
    configs = [
        tiny_config(dp, zero=stage, dtype=dtype, optimizer=optimizer)
        for stage in range(4)
        for dtype, optimizer in numbers
    ]
    workers.check(dp, check_states, configs)


# --- activations ------------------------------------------------------------------------------------------------------


L, n, h, v, a, e = 2, 64, 32, 128, 8, 8  # of tiny_config(1). e: bytes of a float64
BLOCK = e * n * (16 * h + 2 * 2 + a)  # 16 h (input included), LayerNorms' statistics, log-sum-exp
EMBEDDING = n * (8 + 8)  # ids, positions
HEAD = e * n * (2 * h + 2 + 1)  # input, LayerNorm's output and statistics, losses
OPERANDS = L * e * n * 16 * h  # only of blocks: the head's weight gradient is computed in I


def activations(record):
    """Return the rows of the activations, as measured."""
    return {what: count for what, count in record.kept[0].items() if what in (memory.PEAK, memory.RECOMPUTED)}


def test_peaks_of_activations_are_those_by_hand():
    changes = {}, dict(recompute="full"), dict(schedule="gpipe"), dict(schedule="zb-h1")
    none, full, three, halves = (activations(record(tiny_config(1, **fields))) for fields in changes)
    assert none == halves == {memory.PEAK: EMBEDDING + L * BLOCK + HEAD}
    assert three == {memory.PEAK: 3 * none[memory.PEAK]}
    assert full == {memory.PEAK: EMBEDDING + L * e * n * h + HEAD, memory.RECOMPUTED: BLOCK}


def test_whole_gradients_are_those_by_hand(workers):
    """The gradients of three of 6 blocks and of the word table are whole at once. zb-h1 keeps all of them until W."""
    block, word, rest = 12 * h**2 + 13 * h, v * h, 8 * h + 2 * h
    for schedule, elements in (("1f1b", 3 * block + word), ("zb-h1", 6 * block + word + rest)):
        config = tiny_config(2, zero=2, schedule=schedule, num_layers=6, micro_batch_size=3)
        for found in workers.run(2, record, config):
            assert found.kept[0][memory.WHOLE] == e * elements


@pytest.mark.parametrize("schedule, recompute", [("gpipe", "none"), ("gpipe", "full"), ("zb-h1", "none")])
def test_the_meter_counts_what_lives(schedule, recompute):
    """After every action the meter counts exactly the living floating-point tensors that the step made."""
    sizes = []

    def counted():
        count()
        integers = account.current - account.bytes_of(alive())
        assert integers in [j * (EMBEDDING + 8 * n) for j in range(4)], "ids and row indices of 3 micro-batches"
        sizes.append(account.current)

    run, batches = started(tiny_config(1, schedule=schedule, recompute=recompute, dropout=0.1))
    with newly_alive() as alive, meter.Activations(run.executor) as account:
        count, account.count = account.count, counted
        train.train_step(run, batches)
    assert sizes[-1] == 0 and (schedule != "zb-h1" or sizes[1:3] == [OPERANDS, 0])


def unmeasured(config):
    """Return (losses, norms, parameters) after three steps without an instrument."""
    run, batches = started(config)
    done = [train.train_step(run, batches).read() for _ in range(3)]
    return [step.loss for step in done], [step.grad_norm for step in done], parameters(run)


@pytest.mark.parametrize(
    "dp, tp, fields",
    [(2, 1, dict(dtype="bf16", zero=3, recompute="full")), (1, 1, dict(pp=2, schedule="zb-h1", dropout=0.1))],
)
def test_measuring_changes_no_bit(workers, dp, tp, fields):
    config = tiny_config(dp, tp, **fields)
    ranks = dp * tp * config.pp
    both = workers.run(ranks, unmeasured, config), workers.run(ranks, record, config, 3)
    for (losses, norms, after), measured in zip(*both, strict=True):
        assert (losses, norms) == (measured.losses, measured.norms)
        assert all(torch.equal(p, measured.after[name]) for name, p in after.items())


@pytest.mark.parametrize("metered", [False, True])
def test_a_tensor_that_backward_needs_may_not_change_in_place(metered):
    """PyTorch itself checks this only without the meter's hooks. The error is the same."""
    run, _ = started(tiny_config(1))
    x = torch.ones(3, requires_grad=True)
    with meter.Activations(run.executor) if metered else contextlib.nullcontext():
        y = x.exp()
        y.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* version 1; expected version 0"):
            y.sum().backward()


def test_the_report_shows_counted_bytes():
    run, batches = started(tiny_config(1, dtype="bf16"))
    with meter.Activations(run.executor) as account:
        train.train_step(run, batches)
    elements = zero_states.stored(run.layout, 0)
    lines = report.measured_tables(run, account).splitlines()
    cells = {name.strip(): [x.strip() for x in rest] for name, *rest in (line.split(" | ") for line in lines)}
    assert cells["model states"] == [f"{18 * elements:,}", f"{18 * elements:,}", "18.00"]
    assert cells["gradients"][-1] == "4.00"
    assert cells[memory.PEAK][:2] == [f"{account.peak:,}"] * 2
    assert lines[-1] == f"P = {elements:,} parameters as stored, with padding"
