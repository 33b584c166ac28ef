"""Models from local Hugging Face directories: loading, the verified rewrite, tiny random ones.

It downloads nothing (`engine.models` does). The one thing that must stay true: a model that
`load` returns as `fused` gave the untouched transformers model's logits on a probe.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from posttrain.core.errors import PreflightError, UsageError
from posttrain.engine.decoder import Attend, Decoder, Rotary, Shape, fused_tensors
from posttrain.engine.unfused import UnfusedDecoder

__all__ = [
    "CHATML",
    "AnyDecoder",
    "Attend",
    "Decoder",
    "UnfusedDecoder",
    "full_attention",
    "load",
    "load_tokenizer",
    "random_model",
    "skeleton_over",
]

transformers_logging.disable_progress_bar()  # progress is the command line's to show

AnyDecoder = Decoder | UnfusedDecoder

PROBE_TOLERANCE = 1e-4
"""Largest difference of a logit, over the largest logit, in float32."""
PROBE_LENGTH = 24
FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary variants whose frequencies do not depend on the length of the context."""


def load(path: Path | str, *, dtype: torch.dtype, verify: bool = True) -> AnyDecoder:
    """Load a local model; `rewrite` of the result says which forward pass it runs.

    With `verify`, the result is compared with the untouched model on a probe in float32
    (`PROBE_TOLERANCE`); a fused pass that differs is given up for the unmodified model.

    Raises:
        PreflightError: there is no readable model, or not even its unmodified form can run here.
    """
    reference = _reference(Path(path))
    shape = _shape(reference.config)
    expected = _probe_reference(reference) if verify else None
    fused = _fuse(reference, shape=shape, dtype=torch.float32)
    if fused is not None and (expected is None or _agrees(fused, expected)):
        return _cast(fused, dtype)
    unfused = UnfusedDecoder(reference, shape=shape)
    if expected is not None and not _agrees(unfused, expected):
        raise PreflightError(
            f"the model in {path} ({reference.config.model_type}) does not give its own logits "
            "through the engine's attention.", "use a model with plain causal attention"
        )  # fmt: skip
    unfused.model.to(dtype)
    return unfused


def skeleton_over(decoder: AnyDecoder) -> AnyDecoder:
    """A second module over the same storage, without gradients: for the engine, while the trainer
    owns the first.
    """
    return decoder.skeleton()


def full_attention(
    positions_T: torch.Tensor, rows_T: torch.Tensor | None = None
) -> Callable[..., torch.Tensor]:
    """An `Attend` without a cache: every token sees the tokens of its row (`rows_T`; None: one
    row) at its own or a smaller position. The plain reference that everything else is tested by.
    """
    visible_TT = positions_T[:, None] >= positions_T[None, :]
    if rows_T is not None:
        visible_TT = visible_TT & (rows_T[:, None] == rows_T[None, :])

    def attend(
        layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> torch.Tensor:
        repeats = q_THD.shape[1] // k_TKD.shape[1]
        k_HTD = k_TKD.repeat_interleave(repeats, dim=1).transpose(0, 1)
        v_HTD = v_TKD.repeat_interleave(repeats, dim=1).transpose(0, 1)
        out_HTD = functional.scaled_dot_product_attention(
            q_THD.transpose(0, 1)[None], k_HTD[None], v_HTD[None], attn_mask=visible_TT
        )
        return out_HTD[0].transpose(0, 1)

    return attend


def load_tokenizer(path: Path | str) -> Any:
    """Transformers' tokenizer of a local model.

    Raises:
        PreflightError: the directory holds none.
    """
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise PreflightError(
            f"no tokenizer can be read from {path}: {error}.", "posttrain models ls"
        ) from error


# --- the verified rewrite ---------------------------------------------------------------------


def _reference(path: Path) -> Any:
    if not (path / "config.json").is_file():
        raise PreflightError(
            f"no model at {path}: a directory with config.json was wanted.",
            "posttrain models fetch smollm2-135m, or name a local model directory",
        )
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            str(path), config=config, dtype=torch.float32, local_files_only=True,
            attn_implementation="eager",
        )  # fmt: skip
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise PreflightError(
            f"the model in {path} cannot be loaded: {error}.", "fetch or copy it again"
        ) from error
    return model.eval()


def _shape(config: Any) -> Shape:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    limits = [config.max_position_embeddings]
    if (window := getattr(config, "sliding_window", None)) is not None:
        limits.append(window)
    return Shape(
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        value_dim=getattr(config, "v_head_dim", None) or head_dim,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        max_context=min(limits),
    )


def _fuse(reference: Any, *, shape: Shape, dtype: torch.dtype) -> Decoder | None:
    """A fused decoder over copies of the reference's tensors; None where the structure differs."""
    config = reference.config
    rope = getattr(config, "rope_parameters", None) or {}
    rotary = getattr(reference.base_model, "rotary_emb", None)
    plain = (
        rope.get("rope_type") in FIXED_ROPE
        and getattr(config, "hidden_act", "") == "silu"
        and hasattr(config, "rms_norm_eps")
    )
    if not plain or rotary is None:
        return None
    tensors = fused_tensors(
        dict(reference.named_parameters()), shape=shape, intermediate=config.intermediate_size,
        dtype=dtype,
    )  # fmt: skip
    if tensors is None:
        return None
    turn = Rotary(rotary.inv_freq, scaling=float(rotary.attention_scaling))
    return Decoder(config=config, shape=shape, rotary=turn, tensors=tensors)


def _cast(decoder: Decoder, dtype: torch.dtype) -> Decoder:
    for parameter in decoder.parameters():
        parameter.data = parameter.data.to(dtype)
    return decoder


def _probe(vocab: int) -> torch.Tensor:
    """Ids spread over the whole vocabulary, the same on every machine."""
    return torch.tensor([zlib.crc32(b"%d" % i) % vocab for i in range(PROBE_LENGTH)])


@torch.no_grad()
def _probe_reference(reference: Any) -> torch.Tensor:
    ids_T = _probe(reference.config.vocab_size)
    return reference(input_ids=ids_T[None], use_cache=False).logits[0].clone()


@torch.no_grad()
def _agrees(decoder: AnyDecoder, expected_TV: torch.Tensor) -> bool:
    ids_T = _probe(decoder.shape.vocab)
    positions_T = torch.arange(len(ids_T))
    got_TV = decoder.logits(decoder.hidden(ids_T, positions_T, full_attention(positions_T)))
    if got_TV.shape != expected_TV.shape:
        return False
    return bool((got_TV - expected_TV).abs().max() <= PROBE_TOLERANCE * expected_TV.abs().max())


# --- tiny random models -----------------------------------------------------------------------

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MIN_VOCAB = 256 + len(SPECIAL_TOKENS)
_CORPUS = (
    "system user assistant Answer: Reply with only the final answer. What is the sum of and ? "
    "How many letters are in the word ? List the files, then count the lines of each of them."
)


def random_model(
    directory: Path | str,
    *,
    vocab: int = 320,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    family: str = "llama",
    **config: Any,
) -> Path:
    """Write a random model and a byte-level tokenizer with a ChatML template; for tests and the
    preset `smoke`. `config` holds further settings of the family's transformers configuration.

    Raises:
        UsageError: `vocab` does not hold the 256 bytes and the special tokens.
    """
    if vocab < _MIN_VOCAB:
        raise UsageError(
            f"a vocabulary of at least {_MIN_VOCAB} was wanted, got {vocab}.", "raise vocab"
        )
    directory = Path(directory)
    settings = {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": 2048,
        "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    settings.update(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    model.save_pretrained(directory)
    _byte_tokenizer(vocab).save_pretrained(directory)
    return directory


def _byte_tokenizer(vocab: int) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=CHATML, clean_up_tokenization_spaces=False,
    )  # fmt: skip
