"""LoRA siblings of PEFT: one frozen base, small states, the bits of training alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from arraypipe_models import adamw
from runs import array_trainer, run

from optsched.arraypipe import Job, random_schedule, read_weights
from optsched.arraypipe.train_alone import differences
from optsched.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 50,
    "intermediate_size": 64, "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
ORDER = random_schedule([2, 2, 2], 2, seed=1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of `from_pretrained`."""
    folder: Path = tmp_path_factory.mktemp("base")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(folder)
    return folder


def adapted(base: Path, alpha: int = 8) -> Any:
    """The base with adapters."""
    settings = peft.LoraConfig(
        r=2,
        lora_alpha=alpha,
        lora_dropout=0.1,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(base), settings)


def batches(n: int = 16) -> list[dict[str, Any]]:
    """Random tokens, the first of them not valid targets."""
    draw, rows = torch.Generator().manual_seed(0), []
    for k in range(n):
        tokens = torch.randint(50, (10,), generator=draw)
        labels = tokens.masked_fill(torch.arange(10) < k % 5, -100)
        rows.append(
            {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
        )
    return rows


def jobs_of(**settings: Any) -> list[Job]:
    """Three seeds."""
    return [Job(s, 4, adamw, microbatches=2, **settings) for s in range(3)]


def test_siblings_share_the_base(base: Path) -> None:
    """Cut into stages, with dropout, tied weights and padding: exact, and one base in the end."""
    jobs = jobs_of(recompute=True)
    array = array_trainer(lambda: adapted(base), batches(), stages=2, jobs=jobs, memory=230_000)
    result = run(array, ORDER, 3)
    for j in range(3):
        assert differences(result.trained[j], array.train_alone(j, 3)) == []
    first, *others = (dict(model.named_parameters()) for model in result.models)
    for name, parameter in first.items():
        for other in others:
            assert (parameter is other[name]) == ("lora_" not in name), name


def test_adapters_are_small_checkpoints(base: Path, tmp_path: Path) -> None:
    """PEFT reads the adapter; the state dict is complete; resumed to the same bits."""
    array = array_trainer(lambda: adapted(base), batches(), stages=2, jobs=jobs_of())
    result = run(array, ORDER, 2, checkpoint=tmp_path, checkpoint_every=1)
    place = tmp_path / "job1" / "2"
    plain = transformers.LlamaForCausalLM.from_pretrained(base)
    loaded = peft.PeftModel.from_pretrained(plain, place)
    trained = result.models[1].state_dict()
    assert all(torch.equal(value, trained[key]) for key, value in loaded.state_dict().items())
    adapted(base).load_state_dict(read_weights(place))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    frozen = {path.stat().st_ino: path.stat().st_size for path in files if "frozen" in path.name}
    assert len(frozen) == 2  # a file for each stage, linked from six checkpoints
    other = array_trainer(lambda: adapted(base, alpha=32), batches(), stages=2, jobs=jobs_of())
    with pytest.raises(InputError, match="adapter setting lora_alpha 8, the job has 32"):
        run(other, ORDER, 4, checkpoint=tmp_path, resume=True)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        whole = (place / name).read_bytes()
        (place / name).write_bytes(whole[:-20])
        with pytest.raises(
            InputError, match=rf"{name} (is damaged|cannot be read).*iteration 1 is"
        ):
            run(array, ORDER, 4, checkpoint=tmp_path, resume=True)
        (place / name).write_bytes(whole)
    again = run(array, ORDER, 4, checkpoint=tmp_path, resume=True)
    for j in range(3):
        alone = array.train_alone(j, 4)
        for name, value in again.trained[j].parameters.items():
            assert torch.equal(value, alone.parameters[name])
