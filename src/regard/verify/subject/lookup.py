"""Finding an object by its name: `PATH.py:NAME`, `package.module:NAME`, `package.module.NAME`."""

import builtins
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.verify.subject.subject import SubjectError, called

NEEDED = "give PATH.py:NAME, package.module:NAME, or a folder with a transformers model"


def find(name: str) -> tuple[Any, Any]:
    """The object, and the module that holds it. Only that file is run.

    Raises:
        SubjectError: if there is no such file or name, or the file cannot be run.
    """
    where, _, attribute = name.rpartition(":")
    if not where:
        where, _, attribute = name.rpartition(".")
    if not where or not attribute:
        raise SubjectError(f"{name!r} names nothing: {NEEDED}")
    module = _file(Path(where)) if where.endswith(".py") else _module(where)
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [n for n in vars(module) if not n.startswith("_") and callable(vars(module)[n])]
            raise SubjectError(f"{where} has no {attribute!r}; it has {', '.join(names[:12])}")
        found = getattr(found, part)
    return _with_a_signature(found), module


def _file(path: Path) -> Any:
    if not path.is_file():
        raise SubjectError(f"there is no file {path}: {NEEDED}")
    spec = importlib.util.spec_from_file_location(f"regard_subject_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent.resolve()))  # as when the file is run as a program
    called(spec.loader.exec_module, module)
    return module


def _module(name: str) -> Any:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return called(importlib.import_module, name)


def _with_a_signature(found: Any) -> Any:
    """The same function with a signature, for torch's, which has none."""
    if found is torch.nn.functional.scaled_dot_product_attention:
        return scaled_dot_product_attention
    return found


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, with a signature."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def is_function(found: Any) -> bool:
    """Whether it is called as it is, and neither a class nor a module."""
    return callable(found) and not isinstance(found, (type, nn.Module))


def named_beside(module: Any, name: str) -> Callable[..., Any]:
    """The object of another name in the subject's file, or of a dotted name.

    Raises:
        SubjectError: if there is none.
    """
    found = getattr(module, name, None) or getattr(builtins, name, None)
    if found is None and "." in name:
        found = find(name)[0]
    if found is None:
        raise SubjectError(f"{getattr(module, '__name__', 'its file')} has no {name!r}")
    return found
