"""Tests of the model: its size, its losses against plain PyTorch, and its step."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import config as configuration
import model
import train
from bench.plain import Plain
from errors import UserError
from model import Block, LayerNorm
from parallel.layout import kind_of
from parallel.mesh import Mesh
from parallel.tensor import ColumnParallelLinear
from parallel.units import MicroBatch, Model, specs
from testing.compare import same_tensor
from testing.tiny import built, refusal, tiny_batches, tiny_config

PARAMETERS = {  # of configs/NAME.py, with the padded vocabulary
    "gpt2_345m": 354_871_296,  # equals Megatron-LM's number
    "gpt2_7b": 6_658_498_560,  # with 2,024 positions
    "gpt2_124m": 124_475_904,
    "codeparrot_110m": 124_475_904,
    "gpt3_1b3": 1_315_819_520,
    "gpt3_13b": 12_853_626_880,
    "opt_125m": 125_262_336,
    "tiny": 875_264,
    "tinyllama_1b1": 1_100_048_384,  # equals the model card's number
    "llama_tiny": 836_736,
    "swallow_8b": 8_030_261_248,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_configuration_has_its_published_number_of_parameters(name):
    """A model has only ParamSpecs until zero.py gives it storage."""
    c = configuration.load([f"configs/{name}.py"])
    assert Model(c, Mesh().tp).num_parameters() == PARAMETERS[name]
    assert configuration.check(c, world=c.tp) == 1, "the configuration runs nowhere"


@pytest.mark.parametrize("own", [torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4, affine=False)])
def test_a_parameter_or_buffer_of_torch_is_refused_by_name(own):
    unit = LayerNorm("head.ln", 4, None)
    unit.gate = own
    with pytest.raises(UserError, match=r"LayerNorm.gate.\w+ is torch's own, .*ParamSpec"):
        specs(unit)


def test_two_parameters_with_one_name_are_refused(monkeypatch):
    init = LayerNorm.__init__
    monkeypatch.setattr(LayerNorm, "__init__", lambda self, name, *rest: init(self, "block0.norm", *rest))
    with pytest.raises(UserError, match=r"two parameters are named block0.norm.weight; give each its own"):
        Model(tiny_config(1), tp=None)


def test_a_cut_dimension_that_tp_does_not_divide_is_refused_by_name(monkeypatch):
    build = Block.__init__

    def with_341_columns(self, c, index, tp, *rest):
        build(self, c, index, tp, *rest)
        self.mlp.fc1 = ColumnParallelLinear(f"block{index}.fc1", (341, c.hidden_size), 0.02, c, tp)

    monkeypatch.setattr(Block, "__init__", with_341_columns)
    Model(tiny_config(2), tp=None)
    with pytest.raises(UserError, match=r"block0\.fc1\.weight: dimension 0 = 341 is not a multiple of tp = 2"):
        Model(tiny_config(1, tp=2), tp=None)


def test_a_model_declares_fields(monkeypatch):
    monkeypatch.setattr(model, "FIELDS", {"window": 128, "gate": False, "norm": "layer", "base": 1.0}, raising=False)
    given = tiny_config(1, own="window=64,gate=True,base=2,norm=rms")
    assert configuration.own_fields(tiny_config(1)) == model.FIELDS
    assert configuration.own_fields(given) == {"window": 64, "gate": True, "norm": "rms", "base": 2}
    assert configuration.own_text(given) == "window=64,gate=True,norm=rms,base=2.0", (
        "a default that changes is not seen"
    )
    for wrong in ("window=a", "window=1.5", "window", "gate=1", "base=(", "window=True"):
        name = wrong.partition("=")[0]
        assert refusal(configuration.own_fields, tiny_config(1, own=wrong)).startswith(
            f"own={wrong}: {name} should be like "
        )
    for wrong in (["window"], {"window": None}, {"gate": torch.relu}):
        monkeypatch.setattr(model, "FIELDS", wrong)
        assert "should be a dict of names and numbers" in refusal(configuration.own_fields, tiny_config(1))


@pytest.fixture(params=["gelu", "relu"])
def run(request):
    return built(tiny_config(1, init_method_std=0.2, activation=request.param))


def samples(run, b=3):
    return torch.randint(0, 100, (b, run.config.seq_length + 1), generator=torch.Generator().manual_seed(9))


def test_losses_and_gradients_are_those_of_plain_pytorch(run):
    tokens, plain = samples(run, 6), Plain(run.config, run.mesh.tp).double()
    with torch.no_grad():
        batch = run.model.micro_batch(tokens[:, :-1], tokens[:, 1:])
        expected = plain.losses(tokens[:, :-1], tokens[:, 1:], 100)
        assert torch.allclose(run.model(batch), expected, rtol=1e-12)

    with pytest.raises(UserError, match="to train"):
        run.model(batch)
    parts = iter([run.model.micro_batch(t[:, :-1], t[:, 1:]) for t in tokens.split(3)])
    run.zero.zero_grad()
    loss = run.executor.run(parts, 2, 8.0 / 2) / 2
    mean = plain.losses(tokens[:, :-1], tokens[:, 1:], 100).mean()
    mean.backward()
    assert torch.allclose(loss, mean.detach(), rtol=1e-12)
    right = plain.gradients()
    for p in run.model.parameters():  # 8 is the loss scale
        same_tensor(f"the gradient of {p.spec.name}", p.grad, 8 * right[p.spec.name])
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])  # contains the tied table once
    assert torch.allclose(run.zero.squared_norm().sqrt(), 8 * norm, rtol=1e-12)


def test_dropout_acts_in_training_only_and_on_every_site(monkeypatch):
    """The sites are the embedding and both outputs of each block."""
    config = tiny_config(1, dropout=0.5)
    run = built(config)
    tokens, sites = samples(run), []

    def drop(batch, seed, site):
        sites.append((site, seed))
        return original(batch, seed, site)

    original = MicroBatch.drop
    monkeypatch.setattr(MicroBatch, "drop", drop)
    with torch.no_grad():
        dropped = run.model(run.model.micro_batch(tokens[:, :-1], tokens[:, 1:], torch.arange(3)))
        assert sites == [(site, config.seed) for site in range(5)]
        whole = run.model(run.model.micro_batch(tokens[:, :-1], tokens[:, 1:]))
    right = Plain(config, run.mesh.tp).double().losses(tokens[:, :-1], tokens[:, 1:], 100)
    assert torch.allclose(whole, right, rtol=1e-12)
    assert not torch.allclose(dropped, whole, rtol=1e-3)


class Reads(TorchDispatchMode):
    """Records the operations that read a tensor's value on the host."""

    names = ()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("_local_scalar_dense", "equal", "nonzero", "is_nonzero"):
            self.names += (str(function),)
        return function(*args, **(kwargs or {}))


def test_a_unit_hands_on_x_alone(run):
    """A tensor in the micro-batch would reach the next unit on one process only."""
    batch = next(tiny_batches(run))
    with pytest.raises(AttributeError, match=r"batch\.v0: a unit hands on only x: with pp the next unit is on another"):
        batch.v0 = batch.ids
    batch.caches = []


@pytest.mark.parametrize(
    "fields", [dict(dropout=0.1), dict(recompute="full"), dict(dtype="bf16", clip_grad=0.0)], ids=str
)
def test_the_host_reads_no_number_within_a_step(fields):
    run = built(tiny_config(1, **{"dtype": "fp32"} | fields))
    batches = tiny_batches(run)
    with Reads() as reads:
        steps = [train.train_step(run, batches) for _ in range(2)]
        assert not reads.names
        assert torch.ones(()).item() and len(reads.names) == 1  # item() is recorded
    assert not any(step.read().skipped for step in steps)


def test_flat_buffers_hold_everything_in_its_range(run):
    """Parameters are aligned views, cut ones first. The padding is never written."""
    batches = tiny_batches(run)
    for _ in range(2):
        train.train_step(run, batches)
    assert set(run.zero.buckets) == {"word", "embedding", "block0", "block1", "head"}
    for bucket in run.zero.buckets.values():
        covered = torch.zeros(bucket.size)
        for i, p in enumerate(bucket.params):
            begin, end = bucket.layout.offsets[i], bucket.layout.offsets[i] + p.numel()
            assert p.data_ptr() == bucket.param.whole[begin:].data_ptr()
            assert p.grad.data_ptr() == bucket.grad.whole[begin:].data_ptr()
            assert begin % 16 == 0
            (kind,) = [r[2:] for r in bucket.ranges if r.begin <= begin and end <= r.end]
            assert kind == kind_of(p.spec)
            covered[begin:end] += 1
        assert covered.max() == 1 and not bucket.param.whole[covered == 0].any()
    block = run.zero.buckets["block0"]
    assert [r[2:4] for r in block.ranges] == [(True, True), (True, False), (False, False)]
    tied = [p for unit in run.model.units for p in unit.parameters() if p.spec.name == "word.weight"]
    assert len(tied) == 2 and tied[0] is tied[1]
