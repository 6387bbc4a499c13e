"""Tests the scaling law against numeric minima, published numbers and the two slides (accounts/scaling.py)."""

import math

import pytest

from accounts import scaling
from accounts.devices import DEVICES
from accounts.scaling import BESIROGLU, FITS, HOFFMANN

BUDGETS = (1e18, 5.76e23, 3e24, 1e27)  # 5.76e23: Gopher's FLOPs, as Hoffmann et al. count them


def printed(capsys, flops, gpus=1):
    """Return {first cell of a line: its other cells} of what `main` prints."""
    scaling.main(flops, gpus, DEVICES["a100-80g"])
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if "|" in line]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize("flops", BUDGETS)
@pytest.mark.parametrize("fit", FITS)
def test_the_closed_form_is_the_numeric_minimum(fit, flops):
    def at(log_n):
        return scaling.loss(fit, math.exp(log_n), flops / 6 / math.exp(log_n))

    n, d = scaling.optimum(fit, flops)
    assert 6 * n * d == pytest.approx(flops, rel=1e-12)
    steps = [at(math.log(n) + shift) for shift in (-0.1, -1e-3, 0, 1e-3, 0.1)]
    assert min(steps) == steps[2], f"another size has a lower loss with the same FLOPs than N = {n:.3g}"


def test_numbers_that_the_papers_state():
    """Hoffmann et al., figure 4: the best size for Gopher's budget is 40 billion. Besiroglu et al.: N ~ C^0.513."""
    exact = HOFFMANN._replace(a=0.3392, b=0.2849)
    assert round(scaling.optimum(exact, 5.76e23)[0] / 1e9) == 40
    assert round(scaling.optimum(HOFFMANN, 5.76e23)[0] / 1e9) == 32
    growth = math.log10(scaling.optimum(BESIROGLU, 1e24)[0] / scaling.optimum(BESIROGLU, 1e23)[0])
    assert round(growth, 3) == 0.513


def test_the_tables_have_the_numbers_of_the_slides(capsys):
    rows = printed(capsys, 3e24)
    assert rows["20 tokens per parameter"][:3] == ["158.1", "3,162", "20.0"]
    assert rows["GPT-3"][:5] == ["175", "300", "1.7", "3.15e+23", "2.002"]
    assert rows["Chinchilla"][:3] == ["70", "1,400", "20.0"]
    of_the_slide = {"LaMDA": "137 168", "Jurassic": "178 300", "Gopher": "280 300", "MT-NLG 530B": "530 270"}
    assert {name: " ".join(rows[name][:2]) for name in of_the_slide} == of_the_slide


@pytest.mark.parametrize(
    "name, peak, days",
    [
        ("LUMI", 20480 / 2 * 383e12, 140),
        ("Aurora", 63744 * 128 * 4096 * 1.6e9, 30),  # 128 cores, 4096 bf16 operations in a cycle, 1.6 GHz
        ("Fugaku", 158976 * 48 * 2 * 16 * 2 * 2.2e9, 2100),  # 48 cores, 2 units of 16 fp32, multiply and add, 2.2 GHz
        ("ABCI", 960 * 312e12 + 4352 * 125e12, 770),
    ],
)
def test_the_machines(capsys, name, peak, days):
    _, on_slide, used, needed = printed(capsys, 1.5e25)[name]
    assert on_slide == f"{days:,}"
    assert float(used.rstrip("%")) == pytest.approx(100 * 3e24 / (peak * days * 86400), abs=0.051)
    assert float(needed.replace(",", "")) == pytest.approx(1.5e25 / (0.4 * peak * 86400), abs=0.051)


def test_the_readers_cluster(capsys):
    assert printed(capsys, 86400 * 1000 * 312e12, 1000)["your cluster"] == ["1,000 a100-80g", "-", "-", "2.5"]
