"""The model of a configuration without weights, compared with what the files of weights hold.

A configuration of a kilobyte can have a million layers or a vocabulary of 2**40. The skeleton is
built on the meta device, where tensors take no memory, and its modules are counted meanwhile.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registry

from regard.hf.loading.untrusted import Contents, refused

MODULES = 16  # modules and parameters for each tensor at most; published models have up to 3
FREE = 2_000  # modules and parameters that any model may have, however few its tensors
UNSAVED = 1 << 24  # elements of parameters that models compute instead of saving them
BUFFERS = 1 << 28  # elements of buffers beyond those of the weights: tables of positions
PACKED = 8  # elements in a byte of quantised weights at most
MEND = "its weights and its configuration must be whole and of one model"
SHOWN = 3  # weights that an error names


def model_class(config: Any) -> Any:
    """The class for `config`: the one it names, if transformers has it, else the usual one. Raises
    a ValueError if transformers has no model for it."""
    import transformers

    for name in config.architectures or ():
        named = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            if isinstance(config, getattr(named, "config_class", None) or ()):
                return named
            raise ValueError(f"{name} does not fit a configuration of {config.model_type}")
    for auto in (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        transformers.MODEL_MAPPING,
    ):
        if type(config) in auto:
            found = auto[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ValueError(f"transformers has no model for {config.model_type}")


def check_skeleton(made_by: Any, config: Any, contents: Contents, file: Path) -> Any:
    """A model of class `made_by` on the meta device. Raises a CheckpointError if it has more
    modules or elements than what `file` holds."""
    tensors = len(contents.names)
    limit = FREE + MODULES * tensors

    def too_many(name: str) -> Exception:
        rule = f"with {tensors} tensors, a model may have {limit} modules and parameters"
        return refused(file, rule, f"{limit + 1} by {name!r}", "mend its configuration")

    with at_most(limit, too_many), torch.device("meta"):
        model = made_by(config)
    held = contents.elements
    if getattr(config, "quantization_config", None) is not None:
        held = max(held, contents.nbytes * PACKED)
    asked = sum(parameter.numel() for parameter in model.parameters())  # tied ones once
    out = "its weights and config.json must be of one model"
    if asked > held + UNSAVED:
        rule = f"its weights hold {held} elements, and its configuration may ask for no more"
        raise refused(file, rule, asked, out)
    buffers = sum(buffer.numel() for buffer in model.buffers())
    if buffers > held + BUFFERS:
        raise refused(file, f"its buffers may have {held + BUFFERS} elements", buffers, out)
    return model


def filled(made_by: Any, path: Path, **options: Any) -> Any:
    """The model that `from_pretrained` returns, which fills missing weights with random values.

    Raises:
        CheckpointError: naming some weights that transformers did not find, or of other shapes.
    """
    also = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # the report names them
    model, report = made_by.from_pretrained(**options, **also)
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if found := sorted(_shown(key) for key in report[kind]):
            shown = f"{len(found)} {kind.replace('_', ' ')}: {', '.join(found[:SHOWN])}"
            raise refused(path, "the files must hold every weight in its shape", shown, MEND)
    return model


def _shown(key: str | tuple[str, Any, Any]) -> str:
    """A weight's name; with the shapes in the files and in the model where those differ."""
    return key if isinstance(key, str) else f"{key[0]} of {tuple(key[1])} for {tuple(key[2])}"


@contextmanager
def at_most(limit: int, error: Callable[[str], Exception]) -> Iterator[None]:
    """Raise the error of a name if more modules and parameters are registered than the limit."""
    count = 0

    def registered(parent: nn.Module, name: str, child: Any) -> None:
        nonlocal count
        count += 1
        if count > limit:
            raise error(name)

    modules = registry.register_module_module_registration_hook(registered)
    parameters = registry.register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        modules.remove()
        parameters.remove()
