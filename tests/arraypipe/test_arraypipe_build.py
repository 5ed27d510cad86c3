"""Start weights from files, weights in files, and frozen bases that jobs share."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

pytest.importorskip("transformers")

import hf_models

from optsched.arraypipe.checkpoint.weights import open_weights, write_weights
from optsched.arraypipe.job import Job
from optsched.arraypipe.model.build import Builder, model_function
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def job(seed: int = 5, **options: Any) -> Job:
    """A job of any model."""
    return Job(seed=seed, batch_size=2, optimizer=lambda named: Adam(named), **options)


def lora(make: Callable[..., nn.Module], **options: Any) -> Callable[..., Any]:
    """The same with adapters."""
    peft = pytest.importorskip("peft")
    settings = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
    return lambda **given: peft.get_peft_model(
        make(**given), peft.LoraConfig(**{**settings, **options})
    )


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """All tensors by unsplit name."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def check_equal(a: nn.Module, b: nn.Module) -> None:
    """Names, types, strides and bits of two models are equal."""
    left, right = tensors(a), tensors(b)
    assert left.keys() == right.keys()
    for name, x in left.items():
        y = right[name]
        assert (x.dtype, x.stride(), x.requires_grad) == (y.dtype, y.stride(), y.requires_grad)
        assert torch.equal(x, y), name


def make(name: str) -> Callable[..., Any]:
    """A function that makes a model."""
    return hf_models.builder(name)


@pytest.mark.parametrize("name", ["w.pt", "hf", "shards", "hf/model.safetensors", "base"])
def test_init_reads_files_and_folders(tmp_path: Path, name: str) -> None:
    """State dict, safetensors, from_pretrained folders whole and in shards, of the base model."""
    build = make("llama tied" if name != "hf/model.safetensors" else "mistral")
    torch.manual_seed(9)
    whole: Any = build()
    torch.save(whole.state_dict(), tmp_path / "w.pt")
    whole.save_pretrained(tmp_path / "hf")
    whole.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    whole.model.save_pretrained(tmp_path / "base")
    builder = Builder(build)
    check_equal(builder.whole(job(init=tmp_path / name)), whole)
    model = builder.whole(job(init=tmp_path / name, precision="bf16"))
    check_equal(model, whole.bfloat16())


def test_init_refuses_by_name(tmp_path: Path) -> None:
    """Missing, unexpected and other shapes."""
    whole = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    state = whole.state_dict()
    path = tmp_path / "w.safetensors"
    cases = [
        ({k: v for k, v in state.items() if k != "1.bias"}, "has no '1.bias'"),
        ({**state, "2.bias": torch.zeros(2)}, "has '2.bias', which the model does not have"),
        ({**state, "0.bias": torch.zeros(5)}, r"'0.bias' has shape \(5,\), in the model \(4,\)"),
    ]
    for found, message in cases:
        write_weights(path, found)
        with pytest.raises(InputError, match=message):
            Builder(lambda: copy.deepcopy(whole)).whole(job(init=path))
    for bad in (tmp_path, tmp_path / "none.pt"):
        with pytest.raises(InputError, match=r"init: .*(has neither|no such file)"):
            Builder(lambda: copy.deepcopy(whole)).whole(job(init=bad))


def test_written_weights_are_safetensors(tmp_path: Path) -> None:
    """Every type, empty and strided tensors, two names of one memory."""
    from safetensors.torch import load_file

    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
    rows = {str(kind): torch.arange(7).to(kind) for kind in kinds}
    rows |= {"none": torch.empty(0, 3), "one": torch.tensor(3.0), "t": torch.randn(3, 4).t()}
    rows["again"] = rows["t"]
    write_weights(tmp_path / "w.safetensors", rows)
    found, opened = load_file(tmp_path / "w.safetensors"), open_weights(tmp_path / "w.safetensors")
    assert found.keys() == rows.keys() == opened.shapes.keys()
    assert all(torch.equal(found[k], v) and found[k].dtype == v.dtype for k, v in rows.items())
    assert all(torch.equal(opened.read(key), value) for key, value in rows.items())


def shared(models: list[nn.Module]) -> set[str]:
    """Names of the parameters that all models have as one object."""
    first, *others = (dict(model.named_parameters()) for model in models)
    return {name for name, p in first.items() if all(p is other[name] for other in others)}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["init", "from_pretrained", "module"])
def test_frozen_base_exists_once(tmp_path: Path, kind: str, precision: str) -> None:
    """From a file, from the user's function, and from a module that is copied."""
    base: Any = make("llama")()
    base.save_pretrained(tmp_path)
    build: Any = lora(make("llama"))
    if kind == "from_pretrained":
        build = lora(partial(type(base).from_pretrained, tmp_path))
    elif kind == "module":
        build = model_function(build())
    builder = Builder(build)
    init = tmp_path if kind == "init" else None
    models = [builder.whole(job(seed, init=init, precision=precision)) for seed in range(3)]
    adapters = [n for n, p in models[0].named_parameters() if p.requires_grad]
    assert shared(models) == dict(models[0].named_parameters()).keys() - adapters
    assert len(adapters) == 12
    one, other = (model.get_parameter(adapters[0]) for model in models[:2])
    assert torch.equal(one, other) == (kind == "module")


def test_module_is_copied_and_keeps_its_tensors() -> None:
    """Training copies does not change the module; arguments and other values are refused."""
    original = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    original[0].requires_grad_(False)
    kept = copy.deepcopy(original)
    made: Any = Builder(model_function(original)).whole(job(precision="bf16"))
    with torch.no_grad():
        made[1].weight.zero_()
    check_equal(original, kept)
    llama = make("llama")()
    assert model_function((type(llama), llama.config))(num_hidden_layers=1).config != llama.config
    for bad, arguments, sentence in (
        (original, {"width": 3}, r"Job\.model must be empty"),
        ("Linear", {}, "expected a function or class"),
        ((type(llama), llama.config), {"widht": 3}, "no attribute 'widht'"),
    ):
        with pytest.raises(InputError, match=sentence):
            model_function(bad)(**arguments)  # type: ignore[arg-type]
