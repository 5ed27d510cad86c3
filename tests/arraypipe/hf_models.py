"""Tiny models of transformers, unmodified, with data sets and collate functions for them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

transformers.logging.set_verbosity_error()

_WORDS = 48
_LLAMA = {
    "vocab_size": _WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {
        "vocab_size": _WORDS, "n_positions": 32, "n_embd": 16, "n_layer": 3, "n_head": 2,
        "loss_type": "ForCausalLM", **_TOKENS}),
    "llama": ("Llama", _LLAMA),
    "llama tied": ("Llama", {**_LLAMA, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", _LLAMA),
    "qwen3": ("Qwen3", {**_LLAMA, "head_dim": 8}),
    "mistral": ("Mistral", {**_LLAMA, "sliding_window": 4}),
    "gemma2": ("Gemma2", {**_LLAMA, "head_dim": 8, "sliding_window": 4}),
    "mixtral": ("Mixtral", {**_LLAMA, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "opt": ("OPT", {
        "vocab_size": _WORDS, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 3,
        "num_attention_heads": 2, "max_position_embeddings": 32, "word_embed_proj_dim": 12,
        **_TOKENS}),
    "gpt-neox": ("GPTNeoX", {
        "vocab_size": _WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 2, "max_position_embeddings": 32, **_TOKENS}),
    "mamba": ("Mamba", {
        "vocab_size": _WORDS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 3,
        **_TOKENS}),
}  # fmt: skip
"""Name -> (prefix of the classes, settings) of causal language models."""

_ENCODER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_labels": 3,
}  # fmt: skip
MODELS = [*CAUSAL, "bert", "vit"]


def build(name: str, dropout: float = 0.0, **settings: Any) -> nn.Module:
    """A model in training mode; `dropout` is that of all its layers that have one."""
    if name == "bert":
        config = transformers.BertConfig(vocab_size=_WORDS, **_ENCODER, **settings)
        kind: Any = transformers.BertForSequenceClassification
    elif name == "vit":
        config = transformers.ViTConfig(image_size=8, patch_size=4, **_ENCODER, **settings)
        kind = transformers.ViTForImageClassification
    else:
        prefix, known = CAUSAL[name]
        config = getattr(transformers, f"{prefix}Config")(**{**known, **settings})
        ends = "LMHeadModel" if prefix == "GPT2" else "ForCausalLM"
        kind = getattr(transformers, prefix + ends)
    for key, value in vars(config).items():
        if ("dropout" in key or "drop" in key.split("_") or key.endswith("pdrop")) and isinstance(
            value, float
        ):
            setattr(config, key, dropout)
    return kind(config).train()  # type: ignore[no-any-return]


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of a data set with indices, as those of `datasets`: lists of numbers by name."""

    def __init__(self, name: str, size: int = 24) -> None:
        self.name, self.size = name, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(index)
        if self.name == "vit":
            pixels = torch.randn(3, 8, 8, generator=draw)
            return {"pixel_values": pixels, "labels": index % 3}
        length = 3 + int(torch.randint(6, (), generator=draw))
        ids = torch.randint(3, _WORDS, (length,), generator=draw).tolist()
        return {"input_ids": ids, "labels": index % 3 if self.name == "bert" else ids}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[k] for k in indices]


def collate(rows: list[dict[str, Any]]) -> transformers.BatchEncoding:
    """Pad rows to the longest, as the collate functions of transformers; no loss of padding."""
    columns: dict[str, Tensor] = {}
    for key in rows[0]:
        values = [torch.as_tensor(row[key]) for row in rows]
        if values[0].dim() == 1:
            columns[key] = pad_sequence(values, True, -100 if key == "labels" else 0)
        else:
            columns[key] = torch.stack(values)
    if "input_ids" in columns:
        columns["attention_mask"] = (columns["input_ids"] != 0).long()
    return transformers.BatchEncoding(columns)


def loader(name: str) -> torch.utils.data.DataLoader[Any]:
    """Data for `ArrayTrainer`: shuffled by every job's seed, in batches of its size."""
    return torch.utils.data.DataLoader(Rows(name), 4, shuffle=True, collate_fn=collate)


def builder(name: str, **settings: Any) -> Callable[..., nn.Module]:
    """`build` of one model, for `ArrayTrainer`."""
    return partial(build, name, **settings)
