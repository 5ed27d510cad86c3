"""
Three learning rates of a Hugging Face GPT-2
============================================

In one job array, in one process or under torchrun::

    python examples/hf_finetune.py [FOLDER OF CHECKPOINTS]
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel

from optsched import ArrayTrainer, Job

config = GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=256, n_positions=32,
                    bos_token_id=0, eos_token_id=0)  # fmt: skip
sums = "".join(f"{a}+{b}={a + b}\n" for a in range(99) for b in range(99))
text = torch.tensor(list(sums.encode()))
data = [{"input_ids": row, "labels": row} for row in text.unfold(0, 32, 32)]
jobs = [Job(seed=0, batch_size=8, optimizer=partial(AdamW, lr=lr)) for lr in (1e-3, 3e-3, 1e-2)]
torch.set_num_threads(1)  # a model this small gains nothing from more
folder = sys.argv[1] if len(sys.argv) > 1 else "ckpt-gpt/"
trainer = ArrayTrainer((GPT2LMHeadModel, config), data, stages=2)
result = trainer.fit(jobs, steps=20, checkpoint=folder, resume=True)
print(result.report, [losses[-1] for losses in result.losses if losses])
