from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.core.errors import CheckpointError, EngineError, PreflightError, UsageError
from posttrain.engine import model as models
from posttrain.engine.model import (
    full_attention,
    load,
    load_tokenizer,
    random_model,
    skeleton_over,
)

FUSED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0,
               "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 32}),
]  # fmt: skip
IDS = torch.tensor([5, 9, 250, 3, 44, 100, 101, 7])
POSITIONS = torch.arange(len(IDS))


def run(decoder: Any) -> torch.Tensor:
    return decoder.logits(decoder.hidden(IDS, POSITIONS, full_attention(POSITIONS)))


@torch.no_grad()
def by_transformers(path: Path) -> torch.Tensor:
    untouched = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return untouched(IDS[None]).logits[0]


@pytest.mark.parametrize(("family", "config"), FUSED)
def test_recognised_structures_are_fused_and_give_the_same_logits(family, config, tmp_path):
    random_model(tmp_path, family=family, seed=3, initializer_range=0.1, **config)
    decoder = load(tmp_path, dtype=torch.float32)
    assert decoder.rewrite == "fused"
    torch.testing.assert_close(run(decoder), by_transformers(tmp_path), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["gpt_neox", "gemma", "olmo2"])
def test_other_structures_run_unmodified_with_the_same_logits(family, tmp_path):
    """Gemma has Llama's parameter names and another norm: only the probe can tell."""
    random_model(tmp_path, family=family, seed=3, initializer_range=0.1)
    decoder = load(tmp_path, dtype=torch.float32)
    assert decoder.rewrite == "unmodified"
    torch.testing.assert_close(run(decoder), by_transformers(tmp_path), atol=2e-5, rtol=1e-5)


def test_a_model_the_engine_cannot_run_is_refused_with_the_reason(tmp_path):
    random_model(tmp_path, family="gemma2", seed=3)
    with pytest.raises(EngineError, match="softcap"):
        load(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_a_saved_model_is_read_back_by_transformers_and_by_us(family, tmp_path):
    random_model(tmp_path / "a", family=family, seed=4, tie_word_embeddings=False)
    decoder = load(tmp_path / "a", dtype=torch.float32)
    with torch.no_grad():
        for view in decoder.named_views().values():
            view.mul_(1.5)
    decoder.save_pretrained(tmp_path / "b")
    torch.testing.assert_close(by_transformers(tmp_path / "b"), run(decoder), atol=2e-5, rtol=1e-5)
    again = load(tmp_path / "b", dtype=torch.float32)
    torch.testing.assert_close(run(again), run(decoder), atol=0, rtol=0)
    text = "its tokenizer came along"
    assert load_tokenizer(tmp_path / "b")(text) == load_tokenizer(tmp_path / "a")(text)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt_neox"])
def test_views_have_transformers_names_and_values(family, tmp_path):
    random_model(tmp_path, family=family, seed=5)
    state = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    views = load(tmp_path, dtype=torch.float32).named_views()
    assert set(views) == set(state)
    for name, view in views.items():
        torch.testing.assert_close(view, state[name].detach(), atol=0, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_skeleton_sees_in_place_changes_and_a_copy_does_not(family, tmp_path):
    random_model(tmp_path, family=family, seed=6)
    decoder = load(tmp_path, dtype=torch.float32)
    decoder.requires_grad_(True)
    skeleton, copied, before = skeleton_over(decoder), decoder.copy(), run(decoder).detach()
    assert not any(parameter.requires_grad for parameter in skeleton.parameters())
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.01)
    assert torch.equal(run(skeleton), run(decoder))
    assert torch.equal(run(copied), before)
    assert not torch.equal(run(skeleton), before)


def test_gradients_equal_those_of_transformers(tmp_path):
    random_model(tmp_path, family="qwen3", seed=7)
    decoder = load(tmp_path, dtype=torch.float32)
    decoder.requires_grad_(True)
    run(decoder).log_softmax(-1)[:, 11].sum().backward()
    untouched = AutoModelForCausalLM.from_pretrained(tmp_path)
    untouched(IDS[None]).logits[0].log_softmax(-1)[:, 11].sum().backward()
    wanted = dict(untouched.named_parameters())
    assert decoder.layers[1].qkv.grad is not None
    q_rows = 4 * decoder.shape.head_dim
    for ours, theirs in (
        (decoder.layers[1].qkv.grad[:q_rows], "model.layers.1.self_attn.q_proj.weight"),
        (decoder.layers[0].gate_up.grad[128:], "model.layers.0.mlp.up_proj.weight"),
        (decoder.embed.grad, "model.embed_tokens.weight"),
    ):
        torch.testing.assert_close(ours, wanted[theirs].grad, atol=1e-5, rtol=1e-4)


def test_rows_packed_side_by_side_do_not_see_one_another(tmp_path):
    random_model(tmp_path, seed=8)
    decoder = load(tmp_path, dtype=torch.float32)
    ids, positions = torch.cat((IDS, IDS[:3])), torch.cat((POSITIONS, POSITIONS[:3]))
    rows = torch.tensor([0] * 8 + [1] * 3)
    packed = decoder.logits(decoder.hidden(ids, positions, full_attention(positions, rows)))
    torch.testing.assert_close(packed[:8], run(decoder), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed[8:], run(decoder)[:3], atol=1e-5, rtol=1e-5)


def test_bfloat16_changes_the_parameters_and_not_the_rotary_frequencies(tmp_path):
    random_model(tmp_path, seed=9)
    wide = load(tmp_path, dtype=torch.float32)
    narrow = load(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.bfloat16}
    assert torch.equal(narrow.rotary.inv_freq, wide.rotary.inv_freq)
    assert run(narrow).dtype is torch.bfloat16


def test_the_same_seed_writes_the_same_model_and_leaves_torchs_chance_alone(tmp_path):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    a, b, c = (random_model(tmp_path / n, seed=s) for n, s in (("a", 1), ("b", 1), ("c", 2)))
    assert torch.equal(torch.rand(1), expected)
    first, second, third = (run(load(path, dtype=torch.float32)) for path in (a, b, c))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_the_tiny_tokenizer_round_trips_any_text_and_renders_chatml(tiny):
    tokenizer = load_tokenizer(tiny)
    text = "Answer: 12 é 😀\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    messages = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id] == [2]


def test_a_missing_model_names_the_next_command(tmp_path):
    with pytest.raises(PreflightError, match="posttrain models fetch"):
        load(tmp_path / "nothing", dtype=torch.float32)
    with pytest.raises(PreflightError, match="no tokenizer"):
        load_tokenizer(tmp_path / "nothing")


def test_a_damaged_model_is_a_preflight_error(tmp_path):
    random_model(tmp_path, seed=1)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(PreflightError, match="cannot be loaded"):
        load(tmp_path, dtype=torch.float32)


def test_a_vocabulary_without_room_for_the_bytes_is_refused(tmp_path):
    with pytest.raises(UsageError, match="at least 259"):
        random_model(tmp_path, vocab=100)


def test_saving_where_nothing_can_be_written_is_a_checkpoint_error(tmp_path):
    random_model(tmp_path / "a", seed=1)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot write"):
        load(tmp_path / "a", dtype=torch.float32).save_pretrained(tmp_path / "file" / "b")


def test_a_fused_pass_that_differs_on_the_probe_is_given_up(tmp_path, monkeypatch):
    random_model(tmp_path, seed=1)
    true_norm = models.Decoder.hidden
    monkeypatch.setattr(models.Decoder, "hidden", lambda *a: true_norm(*a) * 1.001)
    assert load(tmp_path, dtype=torch.float32).rewrite == "unmodified"
