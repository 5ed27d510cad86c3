"""
LoRA adapters of one frozen base
================================

Siblings of a job array, with transformers and PEFT::

    python examples/lora_siblings.py
    torchrun --nproc-per-node 2 examples/lora_siblings.py

The base is in memory once on every device; each adapter is a small state. Model, adapters and
data are as transformers and PEFT make them; the base here is tiny and random.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from optsched.arraypipe import ArrayTrainer, Job, RunConfig

RATES = (1e-3, 3e-3, 1e-2, 3e-2)


def save_base(folder: Path, width: int = 64, depth: int = 4) -> Path:
    """Stand-in for a pretrained model."""
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=width, intermediate_size=4 * width, num_hidden_layers=depth,
            num_attention_heads=4, vocab_size=256, max_position_embeddings=128,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def adapted(base: Path, rank: int = 8) -> PeftModel:
    """The base with an adapter."""
    settings = LoraConfig(r=rank, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    return get_peft_model(LlamaForCausalLM.from_pretrained(base), settings)


def rows(text: str, length: int = 64) -> list[dict[str, Any]]:
    """The bytes of a text, in pieces."""
    data = torch.tensor(list(text.encode()))
    pieces = data[: len(data) // length * length].view(-1, length)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def make_trainer(base: Path) -> ArrayTrainer:
    """Two stages; the loss is the model's."""
    text = Path(sys.argv[0]).read_text()  # of this program
    return ArrayTrainer(lambda **given: adapted(base, **given), rows(text), 2)


def make_jobs() -> list[Job]:
    """One adapter per learning rate; `requires_grad` says what is trained."""

    def optimizer(rate: float) -> Any:
        return lambda named: torch.optim.AdamW([p for _, p in named if p.requires_grad], lr=rate)

    return [Job(k, 8, optimizer(rate), f"lr{rate:g}") for k, rate in enumerate(RATES)]


def main() -> None:
    """Train all adapters, print their losses, load the best one as PEFT does."""
    parser = argparse.ArgumentParser(description="Train LoRA adapters.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("lora"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    base = save_base(given.out / f"base{os.environ.get('RANK', '')}")
    trainer, jobs = make_trainer(base), make_jobs()
    config = RunConfig(verbose=False)
    folder = given.out / "checkpoints"
    result = trainer.fit(jobs, given.steps, checkpoint=folder, resume=True, config=config)
    if os.environ.get("RANK", "0") != "0":
        return
    last = {job.name: losses[-1] for job, losses in zip(jobs, result.losses, strict=True) if losses}
    for name, loss in last.items():
        print(f"{name:8s} loss {loss:.4f}")
    best = min(last, key=last.__getitem__, default=jobs[0].name)
    place = max((folder / best).glob("[0-9]*"), key=lambda path: int(path.name))
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), place)
    trained = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    print(f"{place}: {trained} of {sum(p.numel() for p in model.parameters())} numbers trained")


if __name__ == "__main__":
    main()
