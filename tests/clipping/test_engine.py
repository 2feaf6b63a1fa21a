"""The engine where models are awkward: equality with the definition, or a refusal that says why."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dppeft
from tests import oracle, tiny
from tests.clipping.nets import Net, assert_exact, definition, net_loss, stripped, tokens

# --- uses of a parameter -------------------------------------------------------------------------


def test_B5_tied_embedding_is_one_parameter_with_both_gradients() -> None:
    model = tiny.build("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    batch = tiny.make_batch("gpt2")
    found = dppeft.per_example_grads(model, batch)
    truth = stripped(model, batch)
    assert [name for name in found if "lm_head" in name] == []
    assert oracle.worst_error(found, truth) < 1e-4
    # The norm is that of the sum of both uses, which the square root of two squares is not.
    total = dppeft.clipped_sum(model, batch, max_grad_norm=1.0).norms
    torch.testing.assert_close(total, oracle.norms(truth).float(), rtol=1e-4, atol=1e-6)
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("method", ["lora", "full"])
def test_B7_layers_shared_by_albert(method: str) -> None:
    model = tiny.wake(dppeft.wrap(tiny.build("albert", num_hidden_layers=3), method=method))
    batch = tiny.make_batch("albert")
    found = dppeft.per_example_grads(model.train(), batch)
    assert oracle.worst_error(found, stripped(model, batch)) < 1e-3


def test_B7_two_towers_call_one_encoder() -> None:
    class Towers(Net):
        def forward(self, input_ids: Tensor) -> Tensor:
            a, b = (self.embed(part).mean(1) for part in input_ids.chunk(2, dim=1))
            return self.head(a) * self.head(b)

    assert_exact(Towers(), tokens())


def test_B20_two_forwards_are_one_gradient_clipped_once() -> None:
    model, batch = Net(), tokens()

    def twice(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        reverse = {**batch, "input_ids": batch["input_ids"].flip(1).roll(1, 1) % 7}
        return net_loss(model, batch) + net_loss(model, reverse)

    assert_exact(model, batch, twice)
    truth = definition(model, batch, twice)
    bound = float(oracle.norms(truth).min()) / 2
    found = dppeft.clipped_sum(model, batch, max_grad_norm=bound, loss=twice)
    assert oracle.worst_error(found.grads, oracle.clipped_sum(truth, bound)) < 1e-4


def test_B21_evaluation_inside_the_loss_is_not_a_use() -> None:
    model, batch = Net(), tokens()

    def peeking(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        losses = net_loss(model, batch)
        with torch.no_grad():
            model(batch["input_ids"][:2])
        return losses

    found = dppeft.per_example_grads(model, batch, loss=peeking)
    assert oracle.worst_error(found, definition(model, batch, net_loss)) < 1e-4


def test_B8_frozen_weight_trained_bias_and_a_layer_not_reached() -> None:
    class Spare(Net):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(6, 6)

    model, batch = Spare(), tokens()
    model.head.weight.requires_grad_(False)
    assert_exact(model, batch)
    found = dppeft.per_example_grads(model, batch, loss=net_loss)
    assert "head.weight" not in found
    assert "head.bias" in found
    assert float(found["spare.weight"].abs().max()) == 0
    assert found["spare.weight"].shape == (4, 6, 6)


# --- what owns a parameter -----------------------------------------------------------------------


class Direct(nn.Module):
    """A child's weight and an own parameter used with ``@``: no leaf hook sees either."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.own = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) @ self.own) + x @ self.inner.weight


def test_B13_parameters_read_directly() -> None:
    assert_exact(Net(Direct()), tokens())


def test_B13_parameter_of_the_model_itself() -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))

        def body(self, x: Tensor) -> Tensor:
            return x * self.scale

    assert_exact(Scaled(), tokens())


@pytest.mark.parametrize("method", ["ia3", "vera", "loha", "oft"])
def test_B13_tuners_that_read_their_parameters_directly(method: str) -> None:
    options = {"oft": {"oft_block_size": 8}}.get(method, {})
    model = tiny.build("bert")
    model = tiny.wake(dppeft.wrap(model, method=method, **options), std=0.02)
    batch = tiny.make_batch("bert")
    found = dppeft.per_example_grads(model, batch)
    assert oracle.worst_error(found, stripped(model, batch)) < 1e-3


def test_B13_lora_on_the_token_embedding() -> None:
    model = tiny.wake(dppeft.wrap(tiny.build("llama"), target_modules=["embed_tokens", "q_proj"]))
    batch = tiny.make_batch("llama")
    found = dppeft.per_example_grads(model, batch)
    assert oracle.worst_error(found, stripped(model, batch)) < 1e-3


def test_a_module_that_hangs_in_two_places_keeps_its_parameters() -> None:
    """torch.func.functional_call leaves its own tensors behind in such a module."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bank = nn.ParameterDict({"a": nn.Parameter(torch.randn(6, 6))})
            self.parts = nn.ModuleList([self.Part(self.bank), self.Part(self.bank)])

        class Part(nn.Module):
            def __init__(self, bank: nn.ParameterDict) -> None:
                super().__init__()
                self.bank = bank

            def forward(self, x: Tensor) -> Tensor:
                return torch.tanh(x @ self.bank["a"])

        def forward(self, x: Tensor) -> Tensor:
            return self.parts[1](self.parts[0](x)) @ self.bank["a"]

    model = Net(Twice())
    before = {name: id(p) for name, p in model.named_parameters()}
    batch = tokens()
    assert_exact(model, batch)
    assert {name: id(p) for name, p in model.named_parameters()} == before


def test_multihead_attention_reads_its_projection_directly() -> None:
    class Attending(Net):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

        def body(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    assert_exact(Attending(), tokens())


def test_outputs_that_are_intermediates_of_each_other() -> None:
    """What flows inside the unit must not be counted as arriving from outside."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.tanh(x @ self.weight)
            return hidden, torch.tanh(hidden @ self.weight)

    class Both(Net):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def body(self, x: Tensor) -> Tensor:
            hidden, output = self.block(x)
            return hidden * 2 + output

    assert_exact(Both(), tokens())


# --- where the batch lies ------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [4, 6])  # 6 = the length: an axis that is not the batch
@pytest.mark.parametrize("batch_first", [True, False])
def test_B12_sequence_first(batch_size: int, batch_first: bool) -> None:
    class Encoded(Net):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=batch_first)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def body(self, x: Tensor) -> Tensor:
            if batch_first:
                return self.encoder(x)
            return self.encoder(x.transpose(0, 1)).transpose(0, 1)

    assert_exact(Encoded(), tokens(batch_size))


@pytest.mark.parametrize("batch_size", [3, 8])  # 8 = the source length of the first row
def test_B4_T5_relative_positions_have_no_batch_axis(batch_size: int) -> None:
    model = tiny.build("t5")
    batch = tiny.make_batch("t5", batch_size=batch_size)
    found = dppeft.per_example_grads(model, batch)
    assert oracle.worst_error(found, stripped(model, batch)) < 1e-3


@pytest.mark.parametrize("model_name", ["bert", "gpt2", "albert"])
def test_B2_positions_looked_up_once_for_all_rows(model_name: str) -> None:
    model = tiny.build(model_name)
    batch = tiny.make_batch(model_name)
    found = dppeft.per_example_grads(model, batch)
    truth = stripped(model, batch)
    positions = [name for name in truth if "wpe" in name or "position_embeddings" in name]
    assert positions
    for name in positions:
        torch.testing.assert_close(found[name].double(), truth[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model_name", ["roberta", "bert", "gpt2-classify"])
def test_B10_padding_gets_no_gradient_and_right_and_left_agree(model_name: str) -> None:
    model = tiny.build(model_name)
    batch = tiny.make_batch(model_name, lengths=(8, 3, 5, 2))
    found = dppeft.per_example_grads(model, batch)
    truth = stripped(model, batch)
    assert oracle.worst_error(found, truth) < 1e-3
    if model_name == "roberta":
        assert (
            float(found["roberta.embeddings.word_embeddings.weight"][:, tiny.PAD].abs().max()) == 0
        )
