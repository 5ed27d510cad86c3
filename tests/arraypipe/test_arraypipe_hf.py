"""Unmodified models of transformers, cut at their blocks, reach the bits of plain loops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("transformers")

import hf_models
import transformers
from arraypipe_models import adamw, sgd
from runs import array_trainer, run

from optsched import InputError
from optsched.arraypipe import ArrayTrainer, Job, random_schedule
from optsched.arraypipe.runtime.data import batches_of
from optsched.arraypipe.train_alone import differences

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

STEPS = 2


def trainer(name: str, jobs: list[Job], stages: Any, **settings: Any) -> ArrayTrainer:
    """An array of a model that computes its loss itself."""
    build = hf_models.builder(name, **settings)
    return array_trainer(build, hf_models.loader(name), jobs=jobs, stages=stages, loss=None)


def plain(name: str, job: Job, **settings: Any) -> tuple[dict[str, Any], list[float]]:
    """Weights and losses of a loop in plain PyTorch."""
    torch.manual_seed(job.seed)
    model = hf_models.build(name, **settings)
    optimizer = job.optimizer(list(model.named_parameters()))
    batches = batches_of(hf_models.loader(name))(job, 0)
    losses = []
    for _ in range(STEPS):
        loss = model(**next(batches)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.state_dict(), losses


@pytest.mark.parametrize("name", [name for name in hf_models.MODELS if name != "llama tied"])
def test_the_bits_of_a_plain_loop(name: str) -> None:
    """Padded batches with labels, three stages, keys of the state dict as in the whole model.

    GPT-2 is wide enough that gradients of its tied head, behind a layer norm, add up to zero.
    """
    wide = {"vocab_size": 64, "n_embd": 32} if name == "gpt2" else {}
    jobs = [Job(1, 4, adamw), Job(2, 4, sgd, recompute=True)]
    result = run(trainer(name, jobs, 3, **wide), random_schedule([1, 1], 3, seed=1), STEPS)
    for job, model, trained in zip(jobs, result.models, result.trained, strict=True):
        weights, losses = plain(name, job, **wide)
        found = model.state_dict()
        assert list(found) == list(weights)
        assert all(torch.equal(found[key], weights[key]) for key in weights)
        assert list(trained.losses) == losses


@pytest.mark.slow
@pytest.mark.parametrize("name", hf_models.MODELS)
def test_dropout_and_micro_batches(name: str) -> None:
    """With random numbers, parts of a batch with different numbers of targets, and clipping."""
    jobs = [Job(1, 4, adamw, microbatches=2, clip_norm=1.0)]
    array = trainer(name, jobs, 2, dropout=0.1)
    assert array.check_exact(STEPS) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpointing", "reentrant", "eager", "compiled", "frozen"])
def test_settings_of_the_model(kind: str) -> None:
    """Its gradient checkpointing, its attention, compiled blocks, frozen embeddings."""

    def build() -> nn.Module:
        attention = {"attn_implementation": "eager"} if kind == "eager" else {}
        model: Any = hf_models.build("gpt2", 0.1, **attention)
        if kind in ("checkpointing", "reentrant"):
            again = kind == "reentrant"
            model.gradient_checkpointing_enable({"use_reentrant": again})
        if kind == "compiled":
            for block in model.transformer.h:
                block.mlp.compile(backend="eager")
        if kind == "frozen":
            model.transformer.wpe.requires_grad_(False)
            model.transformer.h[0].eval().requires_grad_(False)
        return model

    jobs = [Job(1, 4, adamw, microbatches=2), Job(2, 4, sgd, recompute=True)]
    array = array_trainer(build, hf_models.loader("gpt2"), jobs=jobs, stages=[1, 2], loss=None)
    assert array.cuts == ("transformer.h.1", "transformer.h.2")
    assert array.check_exact(STEPS) == []


def test_a_loss_function_gets_output_and_batch() -> None:
    """Of a batch that is a dict the whole of it; a pair may have a dict as input."""

    def from_batch(output: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(output.logits, batch["labels"])

    def pairs(job: Job, start: int) -> Iterator[Any]:
        for batch in batches_of(hf_models.loader("bert"))(job, start):
            batch = dict(batch)
            yield batch, batch.pop("labels")

    jobs, build = [Job(1, 4, adamw, microbatches=2)], hf_models.builder("bert", dropout=0.1)
    losses = []
    for data, loss in (
        (hf_models.loader("bert"), from_batch),
        (pairs, lambda output, labels: from_batch(output, {"labels": labels})),
        (hf_models.loader("bert"), None),
    ):
        array = array_trainer(build, data, jobs=jobs, stages=2, loss=loss)
        losses.append(run(array, random_schedule([2], 2), 1).losses[0])
    assert losses[0] == losses[1] == losses[2] == array.train_alone(0, 1).losses


def test_resume_and_slots(tmp_path: Any) -> None:
    """Checkpoints and states that take turns change no bit."""
    jobs = [Job(1, 4, adamw, microbatches=2), Job(2, 4, sgd, recompute=True)]
    array = trainer("bert", jobs, 3, dropout=0.1)
    order = random_schedule([2, 1], 3, place=[0, 0, 0], seed=2)
    run(array, order, 1, checkpoint=tmp_path)
    array.memory = 600_000
    result = run(array, order, 3, checkpoint=tmp_path, resume=True)
    auto = transformers.AutoModelForSequenceClassification
    read = auto.from_pretrained(tmp_path / "job1" / "3").state_dict()
    assert all(torch.equal(v, read[k]) for k, v in result.models[1].state_dict().items())
    for j, trained in enumerate(result.trained):
        alone = array.train_alone(j, 3)
        found = [line for line in differences(trained, alone) if "iteration" not in line]
        assert found == []
        assert trained.losses == alone.losses[1:]


def refused(build: Any, name: str, sentence: str) -> None:
    """Making a trainer raises."""
    with pytest.raises(InputError, match=sentence):
        array_trainer(build, hf_models.loader(name), jobs=[Job(0, 4, sgd)], stages=2, loss=None)


def test_values_beside_the_hidden_states_are_refused() -> None:
    """Two stacks, positions shared by all layers, router scores of all layers: never in silence."""
    sizes = {"vocab_size": 48, "d_model": 16, "d_ff": 24, "num_layers": 3, "num_heads": 2}
    t5 = transformers.T5Config(d_kv=8, decoder_start_token_id=0, **sizes)
    refused(
        lambda: transformers.T5ForConditionalGeneration(t5), "gpt2",
        r"T5.*'decoder\.block\.1' gets its argument number 2 from an earlier stage; cut it",
    )  # fmt: skip
    refused(
        hf_models.builder("mixtral", output_router_logits=True), "mixtral",
        r"has (the loss .* instead|another gradient) of .*: a value crosses a cut beside",
    )  # fmt: skip
    deberta = transformers.DebertaV2Config(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        vocab_size=48, num_labels=3, relative_attention=True, position_buckets=8,
        pos_att_type=["p2c", "c2p"],
    )  # fmt: skip
    refused(
        lambda: transformers.DebertaV2ForSequenceClassification(deberta).train(), "bert",
        "gets its argument rel_embeddings from an earlier stage",
    )  # fmt: skip
