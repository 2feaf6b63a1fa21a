"""wrap(): the closed-form number of trained tensors, the head, the targets, and what is refused."""

from __future__ import annotations

import copy
import warnings

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

import dppeft
from dppeft.errors import ArgumentError, ArgumentTypeError
from tests.tiny import HEADS, INNER, LAYERS, POSITIONS, VOCAB, WIDTH, build, make_batch, wake

W, R, C = WIDTH, 8, 3
KV = WIDTH // HEADS  # Llama here has one key-value head
BERT_HEAD, ROBERTA_HEAD = C * W + C, W * W + W + C * W + C
# The embedding's LayerNorm and the pooler; per layer query, key, value, two outputs and two
# LayerNorms (7 W), and the inner layer.
BERT_BIASES = W + W + LAYERS * (7 * W + INNER)
# The last LayerNorm; per block two LayerNorms, c_attn, c_proj, c_fc (4 W) and c_proj.
GPT2_BIASES = W + LAYERS * (2 * W + 3 * W + W + 4 * W + W)


def trained(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


COUNTS = {
    # query and value: A is (R, W), B is (W, R)
    ("bert", "lora"): LAYERS * 2 * 2 * R * W + BERT_HEAD,
    ("bert", "ffa_lora"): LAYERS * 2 * R * W + BERT_HEAD,
    ("bert", "dora"): LAYERS * 2 * (2 * R * W + W) + BERT_HEAD,
    ("bert", "bitfit"): BERT_BIASES + BERT_HEAD,
    ("bert", "head"): BERT_HEAD,
    ("roberta", "lora"): LAYERS * 2 * 2 * R * W + ROBERTA_HEAD,
    ("roberta", "head"): ROBERTA_HEAD,
    ("distilbert", "lora"): LAYERS * 2 * 2 * R * W + ROBERTA_HEAD,  # pre_classifier + classifier
    ("distilbert", "head"): ROBERTA_HEAD,
    ("electra", "head"): ROBERTA_HEAD,
    ("albert", "lora"): 2 * 2 * R * W + BERT_HEAD,  # one layer, used twice
    # the fused projection c_attn: A is (R, W), B is (3 W, R)
    ("gpt2", "lora"): LAYERS * (R * W + 3 * W * R),
    ("gpt2", "ffa_lora"): LAYERS * 3 * W * R,
    ("gpt2", "dora"): LAYERS * (R * W + 3 * W * R + 3 * W),
    ("gpt2", "bitfit"): GPT2_BIASES,
    ("gpt2-classify", "lora"): LAYERS * (R * W + 3 * W * R) + C * W,  # score has no bias
    ("gpt2-classify", "bitfit"): GPT2_BIASES + C * W,
    ("gpt2-classify", "head"): C * W,
    ("llama", "lora"): LAYERS * (R * W + W * R + R * W + KV * R),
    ("llama", "ffa_lora"): LAYERS * (W * R + KV * R),
    ("llama", "dora"): LAYERS * (2 * R * W + W * R + KV * R + W + KV),
    ("llama-classify", "head"): C * W,
    # encoder self, decoder self and cross attention
    ("t5", "lora"): 3 * LAYERS * 2 * 2 * R * W,
    ("t5", "ffa_lora"): 3 * LAYERS * 2 * R * W,
    ("t5", "dora"): 3 * LAYERS * 2 * (2 * R * W + W),
    ("bert-mlm", "lora"): LAYERS * 2 * 2 * R * W,
    ("bert-tokens", "lora"): LAYERS * 2 * 2 * R * W + BERT_HEAD,
}


@pytest.mark.parametrize(("name", "method"), COUNTS, ids=lambda value: value)
def test_number_of_trained_parameters(name: str, method: str) -> None:
    model = dppeft.wrap(build(name), method)
    assert isinstance(model, peft.PeftModel)
    assert trained(model) == COUNTS[name, method]


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_full_is_the_model_itself_with_everything_trainable(name: str) -> None:
    model = build(name)
    model.requires_grad_(False)
    assert dppeft.wrap(model, "full") is model
    assert trained(model) == sum(p.numel() for p in model.parameters())
    assert trained(build("gpt2")) == (
        VOCAB * W
        + POSITIONS * W
        + 2 * W
        + LAYERS * (4 * W + 3 * W * W + 3 * W + W * W + W + 2 * 4 * W * W + 5 * W)
    )


@pytest.mark.filterwarnings("ignore:Unsupported layer type")  # PEFT's, of norms that are its own
@pytest.mark.parametrize("name", ["t5", "llama", "llama-classify"])
def test_bitfit_without_biases_trains_the_norms_and_says_so(name: str) -> None:
    """T5's relative_attention_bias is an embedding, no bias."""
    with pytest.warns(UserWarning, match="trains biases and .* has none outside its head"):
        model = dppeft.wrap(build(name), "bitfit")
    names = [n for n, p in model.named_parameters() if p.requires_grad and "score" not in n]
    assert names
    assert all("norm" in n for n in names)


@pytest.mark.parametrize("name", ["gpt2", "t5", "bert-mlm", "llama"])
def test_language_models_have_no_head_to_train(name: str) -> None:
    with pytest.raises(ArgumentError, match="has none. Load the model for classification"):
        dppeft.wrap(build(name), "head")


def test_deberta_trains_its_pooler_with_the_head() -> None:
    config = DebertaV2Config(
        vocab_size=VOCAB, hidden_size=W, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=INNER, max_position_embeddings=40, num_labels=C,
    )  # fmt: skip
    model = dppeft.wrap(DebertaV2ForSequenceClassification(config), "lora")
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert sum("pooler" in name for name in names) == 2
    assert trained(model) == 2 * 2 * R * W + W * W + W + C * W + C


def test_only_the_methods_tensors_train() -> None:
    names = [n for n, p in dppeft.wrap(build("bert"), "lora").named_parameters() if p.requires_grad]
    assert all("lora_" in name or "classifier.modules_to_save" in name for name in names)
    ours = dppeft.wrap(build("bert"), "bitfit").named_parameters()
    assert all(n.endswith(".bias") or ".modules_to_save." in n for n, p in ours if p.requires_grad)


def test_lora_defaults_and_options() -> None:
    config = dppeft.wrap(build("bert")).peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (8, 16, 0.0)
    config = dppeft.wrap(build("bert"), "lora", r=2, lora_alpha=3, use_rslora=True).peft_config[
        "default"
    ]
    assert (config.r, config.lora_alpha, config.use_rslora) == (2, 3, True)
    assert dppeft.wrap(build("gpt2")).peft_config["default"].fan_in_fan_out is True


def test_ffa_keeps_a_frozen_after_the_adapter_was_switched_off_and_on() -> None:
    model = dppeft.wrap(build("bert"), "ffa_lora")
    before = {n for n, p in model.named_parameters() if p.requires_grad}
    with model.disable_adapter():
        pass
    model.set_adapter("default")
    assert {n for n, p in model.named_parameters() if p.requires_grad} == before
    assert not any(".lora_A." in name for name in before)
    assert any(p.abs().sum() > 0 for n, p in model.named_parameters() if ".lora_A." in n)


def test_all_linear_leaves_the_head_and_the_output_layer_alone() -> None:
    model = dppeft.wrap(build("distilbert"), target_modules="all-linear")
    names = [name for name, p in model.named_parameters() if p.requires_grad and "lora_A" in name]
    assert len(names) == LAYERS * 6
    model = dppeft.wrap(build("gpt2"), target_modules="all-linear")
    names = [name for name, p in model.named_parameters() if p.requires_grad and "lora_A" in name]
    assert len(names) == LAYERS * 4
    assert model.peft_config["default"].fan_in_fan_out is True


@pytest.mark.parametrize("training", [True, False])
def test_B22_the_mode_stays_the_users(training: bool) -> None:
    model = build("bert").train(training)
    wrapped = dppeft.wrap(model, lora_dropout=0.1)
    assert {module.training for module in wrapped.modules()} == {training}


@pytest.mark.parametrize("method", ["lora", "dora", "ffa_lora", "head"])
@pytest.mark.parametrize("name", ["bert", "gpt2-classify", "albert", "distilbert"])
def test_a_fresh_wrap_computes_what_the_model_computed(name: str, method: str) -> None:
    model, batch = build(name, double=True).eval(), make_batch(name)
    expected = model(**batch).logits
    wrapped = dppeft.wrap(model, method).eval()
    torch.testing.assert_close(wrapped(**batch).logits, expected)
    wake(wrapped)
    assert not torch.allclose(wrapped(**batch).logits, expected)
    with wrapped.disable_adapter():
        torch.testing.assert_close(wrapped(**batch).logits, expected)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_E2_generate_and_the_models_attributes_work(name: str) -> None:
    model = wake(dppeft.wrap(build(name))).eval()
    batch = {k: v[:1, :2] for k, v in make_batch(name).items() if k != "labels"}
    out = model.generate(**batch, max_new_tokens=3, do_sample=False)
    assert out.shape[0] == 1
    assert model.config.vocab_size == VOCAB
    assert model.device.type == "cpu"
    model.print_trainable_parameters()


# --- plain modules -------------------------------------------------------------------------------


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6))
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x))


def test_plain_module_names_its_targets_and_trains_its_last_layer() -> None:
    model = dppeft.wrap(_Plain(), target_modules=["body.0"], r=2)
    assert trained(model) == 2 * 4 + 5 * 2 + 6 * 2 + 2
    assert model(torch.zeros(3, 4)).shape == (3, 2)
    assert trained(dppeft.wrap(_Plain(), "head")) == 6 * 2 + 2
    assert trained(dppeft.wrap(_Plain(), "bitfit")) == 5 + 6 + 6 * 2 + 2
    # The head can only be guessed here, so that the user's word replaces the guess.
    assert trained(dppeft.wrap(_Plain(), "head", modules_to_save=["body.2"])) == 5 * 6 + 6


def test_plain_module_without_targets_lists_its_linear_layers() -> None:
    with pytest.raises(ArgumentError, match=r"target_modules=\[...\].*Linear layers here: 0 \(1\)"):
        dppeft.wrap(_Plain())


def test_a_name_that_ends_another_is_refused() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(13)))
    with pytest.raises(ArgumentError, match="'2' cannot be trained whole.*would take 12 too"):
        dppeft.wrap(model, "head", modules_to_save=["2"])
    assert trained(dppeft.wrap(model, target_modules=["0"], r=1)) == 6 + 4
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "out": nn.Linear(4, 4)})
    with pytest.raises(ArgumentError, match="'out'.*take lora_dropout too. Rename it"):
        dppeft.wrap(model, target_modules=["body"])
    # A head with the name of the layers below it: PEFT alone would train all of them whole.
    blocks = nn.ModuleList([nn.ModuleDict({"dense": nn.Linear(4, 4)}) for _ in range(3)])
    model = nn.ModuleDict({"blocks": blocks, "dense": nn.Linear(4, 4)})
    with pytest.raises(ArgumentError, match="'dense'.*would take blocks.0.dense, blocks.1"):
        dppeft.wrap(model, "head")


def test_all_linear_on_a_plain_module_spares_its_head() -> None:
    body = nn.ModuleList([nn.Linear(4, 4), nn.ModuleList([nn.ReLU()])])  # "0" ends "1.0" too
    model = nn.ModuleDict({"body": body, "head": nn.Linear(4, 2)})
    assert trained(dppeft.wrap(model, target_modules="all-linear", r=1)) == 8 + 4 * 2 + 2


def test_attention_that_hides_its_weights_is_not_offered() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    with pytest.raises(ArgumentError, match=r"Linear layers here: linear1 \(1\), linear2 \(1\)\.$"):
        dppeft.wrap(model)


# --- wrong use -----------------------------------------------------------------------------------


def test_G4_unknown_names_get_the_nearest_one() -> None:
    with pytest.raises(ArgumentError, match="Unknown method='loro'.*Did you mean 'lora'"):
        dppeft.wrap(build("bert"), "loro")
    with pytest.raises(ArgumentTypeError, match="'lora_dropuot' for method 'lora'. Did you mean"):
        dppeft.wrap(build("bert"), "lora", lora_dropuot=0.1)
    with pytest.raises(ArgumentTypeError, match="'lora_alhpa'.* Did you mean 'lora_alpha'"):
        dppeft.wrap(build("bert"), "dora", lora_alhpa=4)
    with pytest.raises(ArgumentTypeError, match="'r' for method 'bitfit'. Its options: none"):
        dppeft.wrap(build("bert"), "bitfit", r=4)
    with pytest.raises(ArgumentTypeError, match="'use_dora' for method 'dora'"):
        dppeft.wrap(build("bert"), "dora", use_dora=False)
    with pytest.raises(ArgumentTypeError, match="'inference_mode'"):
        dppeft.wrap(build("bert"), "lora", inference_mode=True)


def test_G4_targets_that_match_nothing_list_the_linear_layers() -> None:
    linear = r"Linear layers here: query \(2\), key \(2\), value \(2\), dense"
    with pytest.raises(ArgumentError, match=rf"\['vlaue'\] match no module. {linear}"):
        dppeft.wrap(build("bert"), target_modules=["query", "vlaue"])  # PEFT takes half of it
    with pytest.raises(ArgumentError, match=f"'c_attn' match no module.*{linear}"):
        dppeft.wrap(build("bert"), target_modules="c_attn")
    with pytest.raises(ArgumentError, match="match no module that is not trained whole"):
        dppeft.wrap(build("bert"), target_modules=["classifier"])
    with pytest.raises(ArgumentError, match="no regular expression"):
        dppeft.wrap(build("bert"), target_modules="(query")
    with pytest.raises(ArgumentError, match="match no module"):
        dppeft.wrap(build("bert"), peft.LoraConfig(target_modules=["c_attn"]))


@pytest.mark.parametrize("method", ["bitfit", "full", "prompt_tuning"])
def test_targets_for_a_method_without_targets_are_refused(method: str) -> None:
    with pytest.raises(ArgumentTypeError, match="targets no modules of your choice"):
        dppeft.wrap(build("bert"), method, target_modules=["query"])


@pytest.mark.parametrize("again", ["lora", "head", "full"])
def test_G4_wrapping_twice_is_refused(again: str) -> None:
    wrapped = dppeft.wrap(build("bert"))
    for model in (wrapped, wrapped.get_base_model()):
        with pytest.raises(ArgumentError, match="is wrapped already"):
            dppeft.wrap(model, again)


def test_other_wrong_arguments() -> None:
    with pytest.raises(ArgumentTypeError, match="Expected model to be a torch.nn.Module, got str"):
        dppeft.wrap("bert-base-uncased")  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="ready LoraConfig: set r, target_modules in it"):
        dppeft.wrap(build("bert"), peft.LoraConfig(), target_modules=["query"], r=4)
    with pytest.raises(ArgumentError, match="'nothing' is no module of BertForSeq.*Its children"):
        dppeft.wrap(build("bert"), modules_to_save=["nothing"])
    with pytest.raises(ArgumentError, match="PEFT cannot build 'lora'.*r` should be a positive"):
        dppeft.wrap(build("bert"), r=0)
    with pytest.raises(ArgumentError, match="leaves nothing to train"):
        dppeft.wrap(build("gpt2"), peft.LoraConfig(inference_mode=True))
    with pytest.raises(ArgumentTypeError, match="'full' trains everything"):
        dppeft.wrap(build("bert"), "full", modules_to_save=["classifier"])


# --- ready configurations and PEFT's other tuners ------------------------------------------------


def test_a_ready_configuration_is_completed_and_left_as_it_was() -> None:
    config = peft.LoraConfig(r=4, target_modules=["key"])
    before = copy.deepcopy(config)
    model = dppeft.wrap(build("bert"), config)
    assert trained(model) == LAYERS * 2 * 4 * W + BERT_HEAD
    assert config == before


def test_a_configuration_that_cannot_save_the_head_says_so() -> None:
    config = peft.TrainableTokensConfig(token_indices=[5], target_modules=["word_embeddings"])
    with pytest.warns(UserWarning, match="head stays as it is.*trainable_token_indices"):
        dppeft.wrap(build("bert"), config)
    with pytest.raises(ArgumentError, match="cannot train the head"):
        dppeft.wrap(build("bert"), "trainable_tokens", token_indices=[5])


SMALL = {
    "boft": {"boft_block_size": 8},
    "oft": {"oft_block_size": 8},
    "vblora": {"vector_length": 16, "num_vectors": 32, "topk": 2},
    "c3a": {"block_size": 8},
    "fourierft": {"n_frequency": 20},
    "waveft": {"n_frequency": 20},
    "miss": {"r": 8},
    "shira": {"r": 4},
    "road": {"group_size": 8},
    "adalora": {"total_step": 10},
}
UNBUILDABLE = {"cartridge", "cpt", "multitask_prompt_tuning", "prefix_tuning", "shadow", "xlora"}
NO_HEAD = {"adaption_prompt", "trainable_tokens"}


@pytest.mark.parametrize(
    "method", [m for m in dppeft.methods() if m not in UNBUILDABLE | NO_HEAD | {"full"}]
)
def test_every_tuner_wraps_roberta_by_name_and_trains_its_head(method: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own remarks
        model = dppeft.wrap(build("roberta"), method, **SMALL.get(method, {}))
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        assert sum("classifier.modules_to_save" in name for name in names) == 4
        assert method == "head" or len(names) > 4
        if method != "poly":  # wants a task id with each row
            assert model(**make_batch("roberta")).logits.shape == (4, 3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", sorted(UNBUILDABLE))
def test_what_peft_cannot_build_is_a_typed_error(method: str) -> None:
    with pytest.raises(ArgumentError, match=r"^PEFT|cannot train the head"):
        dppeft.wrap(build("roberta"), method)


@pytest.mark.filterwarnings("ignore:Unsupported layer type")  # PEFT's word for a LayerNorm
@pytest.mark.parametrize("name", ["distilbert", "electra", "albert", "bert-mlm"])
@pytest.mark.parametrize("method", ["ia3", "ln_tuning", "vera", "loha"])
def test_default_targets_where_pefts_table_has_none(name: str, method: str) -> None:
    model = dppeft.wrap(build(name), method)
    assert any(p.requires_grad and "modules_to_save" not in n for n, p in model.named_parameters())


# --- padding and precision -----------------------------------------------------------------------


def test_C3_the_padding_token_of_a_decoder_classifier_is_set_and_logits_do_not_depend_on_it() -> (
    None
):
    model = build("gpt2-classify", double=True).eval()
    model.config.pad_token_id = None
    with pytest.warns(UserWarning, match="it is now the end token's id, 0"):
        wrapped = wake(dppeft.wrap(model)).eval()
    assert model.config.pad_token_id == 0
    batch = make_batch("gpt2-classify")
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 0)
    logits = wrapped(**batch).logits
    for index, length in enumerate(batch["attention_mask"].sum(dim=1)):
        alone = wrapped(input_ids=batch["input_ids"][index : index + 1, :length]).logits
        torch.testing.assert_close(logits[index], alone[0])


def test_C3_no_end_token_to_pad_with_is_refused() -> None:
    model = build("gpt2-classify")
    model.config.pad_token_id, model.config.eos_token_id = None, 50256
    with pytest.raises(ArgumentError, match="Set model.config.pad_token_id"):
        dppeft.wrap(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_F3_half_precision_base_has_float32_adapters_and_a_head_in_its_own(
    dtype: torch.dtype,
) -> None:
    model = dppeft.wrap(build("bert").to(dtype))
    dtypes = {("lora" in n): p.dtype for n, p in model.named_parameters() if p.requires_grad}
    assert dtypes == {True: torch.float32, False: dtype}
