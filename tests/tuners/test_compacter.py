"""Compacter: the factored form is the Kronecker sum, what is shared is one tensor, the counts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dppeft
from dppeft.tuners.compacter import Kronecker, _new_mix
from tests import tiny

D = tiny.WIDTH


def explicit(module: Kronecker) -> Tensor:
    """``sum_i A_i (x) (s_i t_i)`` by torch.kron."""
    n, r = module.n, module.rank
    total = torch.zeros(module.d, module.k, dtype=module.s.weight.dtype)
    for i in range(n):
        a = module.mix.weight[i]
        s = module.s.weight[i * r : (i + 1) * r].T  # (d / n, r)
        t = module.t.weight[:, i * r : (i + 1) * r].T  # (r, k / n)
        total += torch.kron(a, s @ t)
    return total


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("shape", [(5, 12), (2, 7, 12), (2, 3, 4, 12)])
def test_forward_is_an_explicit_dense_product(rank: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    mix = _new_mix(4, "identity")
    module = Kronecker(12, 8, n=4, rank=rank, mix=mix).double()
    x = torch.randn(shape, dtype=torch.float64)
    dense = explicit(module)
    torch.testing.assert_close(module.dense(), dense)
    torch.testing.assert_close(module(x), x @ dense)
    with torch.no_grad():  # where W is cheaper, it is formed
        torch.testing.assert_close(module(x), x @ dense)


def test_factored_and_dense_inference_take_turns_by_cost() -> None:
    cheap = Kronecker(768, 96, n=8, rank=1, mix=_new_mix(8, "identity"))
    dear = Kronecker(32, 8, n=8, rank=4, mix=_new_mix(8, "identity"))
    for module, formed in ((cheap, 0), (dear, 1)):
        calls: list[int] = []
        dense = module.dense
        module.dense = lambda calls=calls, dense=dense: (calls.append(1), dense())[1]  # type: ignore[method-assign]
        module(torch.randn(2, module.d))
        assert not calls  # with gradients never
        with torch.no_grad():
            module(torch.randn(2, module.d))
        assert len(calls) == formed


@pytest.mark.parametrize("shared", [False, True])
def test_parameters_of_roberta_base_are_the_papers(shared: bool) -> None:
    """Yu et al. 2022 with k=96, n=8: 66.0 thousand without sharing, and the head."""
    from transformers import AutoModelForSequenceClassification, RobertaConfig

    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(RobertaConfig(vocab_size=50))
        wrapped = dppeft.wrap(model, "compacter", bottleneck=96, n=8, shared=shared)
    own = sum(p.numel() for n, p in wrapped.named_parameters() if "compacter" in n)
    factors = 24 * 2 * (768 + 96)
    assert own == factors + 8**3 * (1 if shared else 48)
    if not shared:
        assert own == pytest.approx(66.0e3, rel=1e-3)


def test_shared_matrices_are_one_tensor_in_memory_and_in_the_file(tmp_path: Path) -> None:
    model = tiny.wake(dppeft.wrap(tiny.build("bert"), "compacter"))
    mixes = [m.mix for m in model.modules() if isinstance(m, Kronecker)]
    assert len(mixes) == 8
    assert len({id(mix.weight) for mix in mixes}) == 1
    names = [n for n, _ in model.named_parameters() if n.endswith("mix.weight")]
    assert len(names) == 1
    dppeft.export(model, tmp_path / "out")
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert sum(n.endswith("mix.weight") for n in written) == 1
    torch.manual_seed(5)
    again = dppeft.load(tiny.build("bert"), tmp_path / "out")
    batch = tiny.make_batch("bert")
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**batch).logits, again(**batch).logits)
    assert len({id(m.mix.weight) for m in again.modules() if isinstance(m, Kronecker)}) == 1


@pytest.mark.parametrize("second", ["other", "down", "up", "mix"])
def test_a_second_adapter_leaves_the_first_as_it_was(second: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    dppeft.export(tiny.wake(dppeft.wrap(tiny.build("bert"), "compacter")), tmp_path / "out")
    model = tiny.wake(dppeft.wrap(tiny.build("bert"), "compacter")).eval()
    batch = tiny.make_batch("bert")
    with torch.no_grad():
        before = model(**batch).logits
        model.load_adapter(tmp_path / "out", second)
        torch.testing.assert_close(before, model(**batch).logits, rtol=1e-5, atol=1e-6)


def test_a_shared_matrix_has_one_gradient_per_example_summed_over_its_uses() -> None:
    model = tiny.wake(dppeft.wrap(tiny.build("bert"), "compacter"))
    batch = tiny.make_batch("bert")
    found = dppeft.per_example_grads(model, batch)
    (name,) = [n for n in found if n.endswith("mix.weight")]
    for i in range(4):
        model.zero_grad()
        model(**tiny.row(batch, i)).loss.backward()
        torch.testing.assert_close(
            found[name][i], model.get_parameter(name).grad, rtol=1e-3, atol=1e-6
        )


def test_start_values() -> None:
    batch = tiny.make_batch("bert")
    before = tiny.build("bert")(**batch).logits
    assert torch.equal(before, dppeft.wrap(tiny.build("bert"), "compacter")(**batch).logits)
    torch.manual_seed(0)
    spread = {}
    for init in ("identity", "yu2022", "mahabadi2021"):
        mix = _new_mix(8, init)
        module = Kronecker(768, 96, n=8, rank=1, mix=mix)
        module.start(init)
        spread[init] = tuple(float(p.detach().std()) for p in (module.s.weight, module.t.weight))
    assert spread["identity"] == pytest.approx((96**-0.5, 8**-0.5), rel=0.1)
    xavier = [math.sqrt(2) * math.sqrt(2 / (1 + fan)) for fan in (96, 12)]
    assert spread["yu2022"] == pytest.approx(xavier, rel=0.1)
    assert spread["mahabadi2021"] == pytest.approx(xavier, rel=0.1)
    for init in ("yu2022", "mahabadi2021"):
        moved = dppeft.wrap(tiny.build("bert"), "compacter", init=init)(**batch).logits
        assert not torch.equal(before, moved)


def test_identity_keeps_the_variance_of_its_input() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 50, 384)
    variances = []
    for _ in range(20):
        module = Kronecker(384, 96, n=8, rank=1, mix=_new_mix(8, "identity"))
        module.start("identity")
        variances.append(float(module(x).detach().var()))
    assert sum(variances) / 20 == pytest.approx(1.0, rel=0.25)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 7}, "bottleneck=96 is no multiple of n=7"),
        ({"n": 64, "bottleneck": 64}, "width 32 is no multiple of n=64"),
        ({"rank": 0}, "rank=0"),
        ({"init": "zero"}, "init='zero'"),
    ],
)
def test_wrong_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(dppeft.DppeftError, match=message):
        dppeft.wrap(tiny.build("bert"), "compacter", **options)
