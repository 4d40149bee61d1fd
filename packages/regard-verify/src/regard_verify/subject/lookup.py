"""Finding an object by its name: `PATH.py:NAME`, `package.module:NAME`."""

import builtins
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard_verify.blame import line_of_subject
from regard_verify.subject.signatures import order_of
from regard_verify.subject.subject import SubjectError

NEEDED = (
    "give PATH.py:NAME or package.module:NAME; for a model on disk, the name of a function without "
    "arguments that loads it"
)
_ATTENTION = re.compile(r"att(entio)?n|mha|mqa|gqa|mla|sdpa", re.I)


def find(name: str) -> tuple[Any, Any]:
    """The object of a name, and the module that holds it. Only its file and its imports are run.

    Raises:
        SubjectError: if there is no such file or name, or the file cannot be run.

    Examples:
        >>> find("torch.nn:MultiheadAttention")[0].__name__
        'MultiheadAttention'
    """
    if Path(name).is_dir():
        raise SubjectError(f"{name} is a folder: {NEEDED}")
    where, _, attribute = name.rpartition(":") if ":" in name else (name, "", "")
    module = _file(Path(where).expanduser()) if where.endswith(".py") else _module(where)
    found = module
    for part in attribute.split(".") if attribute else ():
        if not hasattr(found, part):
            held = vars(found) if hasattr(found, "__dict__") else {}
            names = [name for name, x in held.items() if not name.startswith("_") and callable(x)]
            close = difflib.get_close_matches(part, names, 3, 0.6)
            told = f"did you mean {' or '.join(close)}?" if close else ""
            told = told or f"it has {', '.join(names[:12])}"
            raise SubjectError(f"{where} has no {attribute!r}; {told}")
        found = getattr(found, part)
    if inspect.ismodule(found):
        names = candidates(found)
        if not names:
            raise SubjectError(
                f"{name} defines no class with forward and no function of (q, k, v); {NEEDED}"
            )
        raise SubjectError(f"{name} is a file: name one of {', '.join(names[:12])} after a colon")
    return found, module


def candidates(module: Any) -> list[str]:
    """Names of what a file defines and can be verified: classes with forward, functions of q, k, v.

    Where some are called attention, only those.
    """
    plain = nn.Module.forward
    found = [
        name
        for name, each in vars(module).items()
        if getattr(each, "__module__", None) == module.__name__
        and name == getattr(each, "__name__", name)
        and (
            getattr(each, "forward", plain) is not plain
            if isinstance(each, type)
            else order_of(each)
        )
    ]
    return [name for name in found if _ATTENTION.search(name)] or found


def _file(path: Path) -> Any:
    if not path.is_file():
        raise SubjectError(f"there is no file {path}: {NEEDED}")
    spec = importlib.util.spec_from_file_location(f"regard_subject_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent.resolve()))  # as when the file is run as a program
    arguments, sys.argv = sys.argv, [str(path)]  # for files that read a command line
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        raise SubjectError(f"running {path} ended the program, exit code {error.code}") from error
    except Exception as error:
        if not isinstance(error, ImportError) or "relative import" not in str(error):
            raise SubjectError(_while_run(path, error)) from error
        return _in_package(path)
    finally:
        sys.argv = arguments
    return module


def _while_run(name: Any, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        where = line_of_subject(error)
        return f"{name} needs {error.name!r}, which is not installed ({where})"
    text = " ".join(str(error).split())[:300]
    return f"{name} cannot be run: {type(error).__name__}: {text} ({line_of_subject(error)})"


def _in_package(path: Path) -> Any:
    """The file as a part of the package that it stands in: it imports its neighbours."""
    top = path.resolve().parent
    while (top.parent / "__init__.py").is_file():
        top = top.parent
    sys.path.insert(0, str(top.parent))
    parts = path.resolve().with_suffix("").relative_to(top.parent).parts
    return _module(".".join(parts))


def _module(name: str) -> Any:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if not all(name.split(".")):
        raise SubjectError(f"there is no module {name!r}: {NEEDED}")
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):
            raise SubjectError(f"there is no module {missing!r}: {NEEDED}") from None
        raise SubjectError(_while_run(name, error)) from error


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


def named_beside(module: Any, name: str) -> Callable[..., Any]:
    """The object of another name in the subject's file, or of `package.module:NAME`.

    Raises:
        SubjectError: if there is none.
    """
    found = getattr(module, name, None) or getattr(builtins, name, None)
    if found is None and ":" in name:
        found, _ = find(name)
    if found is None:
        raise SubjectError(f"{getattr(module, '__name__', 'its file')} has no {name!r}")
    return found
