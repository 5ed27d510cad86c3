"""Models that are built without holding them have the bits of models built whole."""

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
from optsched.arraypipe.model import lazy
from optsched.arraypipe.model.build import Builder, model_function
from optsched.arraypipe.model.lazy import Recorder
from optsched.arraypipe.train_alone import train_alone
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages of 256 bytes are large here, so that tiny models are recorded."""
    monkeypatch.setattr(lazy, "LARGE", 256)


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


class Odd(nn.Module):
    """What people do in constructors."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(20, 20), nn.Linear(20, 20)
        self.c = nn.Linear(20, 20).double()
        self.e, self.d = nn.Embedding(30, 20, padding_idx=2), nn.Linear(20, 30, bias=False)
        nn.init.orthogonal_(self.a.weight)
        nn.init.trunc_normal_(self.b.weight, std=0.02)
        nn.init.sparse_(self.c.weight, 0.3)
        with torch.no_grad():
            self.b.weight[:, 3:7] = self.a.weight[:, :4].clone()
            self.b.weight[:3].copy_(self.b.weight[5:8])
            self.a.weight.mul_(2).add_(self.b.weight.t())
            self.a.weight /= self.a.weight.norm()
            self.b.weight.data = self.b.weight.data.half().float()
            if self.a.weight[0, 0].item() > 0:  # read on the spot
                self.a.weight.neg_()
            self.e.weight.copy_(torch.randn(30, 20) * 0.5)
            self.e.weight[torch.arange(5)] = 0
            for row in self.e.weight:
                row.div_(1 + row.norm())
        self.d.weight = self.e.weight
        self.register_buffer("mask", torch.tril(torch.ones(30, 30, dtype=torch.bool)))
        self.register_buffer("places", torch.arange(2000))
        self.register_buffer("deep", copy.deepcopy(self.places))
        self.register_buffer("outside", torch.from_numpy(self.a.weight.detach().numpy() * 2))
        self.layers = nn.ModuleList(copy.deepcopy(self.b) for _ in range(2))
        for layer in self.layers:
            layer.reset_parameters()  # type: ignore[operator]
        generator = torch.Generator().manual_seed(4)
        self.w = nn.Parameter(torch.dropout(torch.ones(20, 20), 0.3, True))
        self.g = nn.Parameter(torch.empty(20, 20).normal_(generator=generator))
        self.p = nn.Parameter(torch.randperm(2000).float())
        self.q = nn.Parameter(torch.linalg.qr(torch.randn(20, 20))[0])
        self.like = nn.Parameter(torch.randn_like(self.q))
        self.half = nn.Linear(40, 40).bfloat16()
        self.view = nn.Parameter(self.a.weight.data[:18])
        self.frozen = nn.Parameter(torch.eye(20), requires_grad=False)


def mixed() -> nn.Module:
    """Layers of torch with constructors of their own kind."""
    wrapped = nn.utils.parametrizations
    return nn.Sequential(
        nn.LSTM(8, 16, 2), nn.MultiheadAttention(16, 4, kdim=8, vdim=8),
        nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(128),
        nn.Bilinear(8, 8, 4), wrapped.weight_norm(nn.Linear(16, 16)),
        wrapped.spectral_norm(nn.Linear(16, 16)), nn.EmbeddingBag(100, 8, padding_idx=3),
        nn.Transformer(16, 4, 2, 2, 16, batch_first=True),
    )  # fmt: skip


def make(name: str) -> Callable[..., Any]:
    """A function that makes a model."""
    others: dict[str, Any] = {"odd": Odd, "mixed": mixed}
    return others.get(name) or hf_models.builder(name)


@pytest.mark.parametrize("name", [*hf_models.MODELS, "lora", "odd", "mixed"])
def test_recorded_models_have_the_bits_of_whole_ones(name: str) -> None:
    """Weights, buffers, and the state of the generator afterwards."""
    build = lora(make("llama"), r=64) if name == "lora" else make(name)
    torch.manual_seed(3)
    whole, state = build(), torch.get_rng_state()
    torch.manual_seed(3)
    with (recorder := Recorder()):
        made = build()
    assert torch.equal(state, torch.get_rng_state())
    held = sum(t.nbytes for t in tensors(made).values() if not recorder.recorded(t))
    if name in hf_models.MODELS and name != "mamba":  # computes its state from a list
        assert held < 0.2 * sum(t.nbytes for t in tensors(whole).values())
    recorder.finish()
    assert not recorder.table
    check_equal(whole, made)


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_parts_derive_from_weights(precision: str) -> None:
    """Copies and masters made inside are right; what is emptied stays empty."""
    types = {"fp64": torch.float64, "bf16": torch.bfloat16}
    torch.manual_seed(5)
    whole: Any = make("llama tied")().to(types.get(precision, torch.float32))
    with Builder(make("llama tied")).parts(job(precision=precision)) as model:
        got: Any = model
        up = got.model.layers[0].mlp.up_proj.weight
        master, copied = nn.Parameter(up.detach().double()), up.detach().clone()
        got.lm_head.weight.data = got.lm_head.weight.data.new_empty(0)
    assert torch.equal(master, up.double())
    assert torch.equal(copied, whole.model.layers[0].mlp.up_proj.weight)
    assert got.model.embed_tokens.weight.numel() == 0  # tied
    del got.lm_head, got.model.embed_tokens, whole.lm_head, whole.model.embed_tokens
    check_equal(got, whole)


def test_failure_under_recording_builds_whole() -> None:
    """A constructor that cannot be recorded is run again without, and that is said."""

    def build() -> nn.Module:
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("no modes here")
        return nn.Linear(30, 30)

    with pytest.warns(UserWarning, match="no modes here"), Builder(build).parts(job()) as model:
        pass
    torch.manual_seed(5)
    check_equal(model, nn.Linear(30, 30))
    with pytest.raises(ZeroDivisionError), Builder(lambda: 1 / 0).parts(job()):  # type: ignore[arg-type,return-value]
        pass


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
    alone = train_alone(build, job(init=tmp_path / name), [], None, lambda *_: iter(()), steps=0)
    assert all(torch.equal(alone.parameters[key], p) for key, p in whole.named_parameters())
    with builder.parts(job(init=tmp_path / name, precision="bf16")) as model:
        pass
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
