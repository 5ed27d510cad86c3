"""Configurations next to the weights, so that `from_pretrained` reads a checkpoint."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from optsched.arraypipe.checkpoint.weights import open_weights, write_weights

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn


def write_configs(model: nn.Module, checkpoint: Path) -> None:
    """Write ``config.json`` of a model of transformers; of PEFT's models the adapter, merged.

    The adapter's files are those of ``PeftModel.save_pretrained``, for
    ``PeftModel.from_pretrained(base, checkpoint)``.
    """
    adapters: Any = getattr(model, "peft_config", None)
    if isinstance(adapters, dict):
        if len(adapters) == 1:
            _write_adapter(model, checkpoint, *adapters.items())
        return
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if callable(getattr(config, "save_pretrained", None)):
            try:
                config.save_pretrained(checkpoint)
            except Exception as error:  # a configuration that transformers finds invalid
                text = " ".join(str(error).split())
                warnings.warn(f"{checkpoint}: {name} is not written ({text:.200})", stacklevel=2)


def _write_adapter(model: nn.Module, checkpoint: Path, adapter: tuple[str, Any]) -> None:
    from peft import get_peft_model_state_dict

    name, config = adapter
    weights = open_weights(checkpoint)
    names = get_peft_model_state_dict(
        model, state_dict={key: key for key in weights.shapes}, adapter_name=name
    )
    write_weights(
        checkpoint / "adapter_model.safetensors",
        {key: weights.read(found) for key, found in names.items()},
    )
    config.save_pretrained(checkpoint)
