"""import_transformers(): imports transformers without torch's compiler and DTensors, which no rank uses.

These two, and sympy below them, are a quarter of the CPU time in which a rank imports its libraries (bench/LOG.md).
transformers imports DTensors unless its `is_torch_distributed_available()` is false, and uses the compiler only to mark
functions. Therefore that function answers False in this process, and the marks leave their functions as they are. What
a model's own code imports later is not changed.

Only for processes that are ranks: a program of a user may compile or shard transformers' models itself.
"""

import gc
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, Final

from coatcheck.workers.host.model_names import keep_model_names

_COMPILER: Final = "torch._dynamo"
_INDEXING: Final = "torch._dynamo._trace_wrapped_higher_order_op"
# Modules of transformers that every model of ours imports, and that import the rest.
_MODULES: Final = (
    "transformers.models",
    "transformers.modeling_utils",
    "transformers.masking_utils",
    "transformers.generation.utils",
)

_log = logging.getLogger(__name__)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """While inside, garbage is not collected. For imports: they make little garbage, and scanning the objects of the
    libraries again and again is 15% of their time (bench/LOG.md)."""
    collects_garbage = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects_garbage:
            gc.enable()


def import_transformers() -> None:
    """Import what every model needs. Does nothing if transformers is imported already. If this version of transformers
    needs more of torch, import it as a whole."""
    if "transformers" in sys.modules:
        return
    try:
        with _without_compiler(), keep_model_names():
            _disable_distributed()
            for name in _MODULES:
                importlib.import_module(name)
    except Exception as error:
        _log.warning("transformers needs torch's compiler or DTensors, so this process starts later: %s", error)
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        for name in _MODULES:
            importlib.import_module(name)


def _disable_distributed() -> None:
    """Have transformers' `is_torch_distributed_available()` return False from now on. It keeps its first answer."""
    import torch.distributed
    from transformers.utils.import_utils import is_torch_distributed_available

    with _replace(torch.distributed, "is_available", lambda: False):
        is_torch_distributed_available()
    if is_torch_distributed_available():
        raise ImportError("is_torch_distributed_available() does not keep its first answer")


@contextmanager
def _without_compiler() -> Iterator[None]:
    """While inside, torch's compiler is a module with the decorators alone. Any other use of it raises ImportError or
    AttributeError."""
    import torch.compiler

    if _COMPILER in sys.modules:
        yield
        return
    compiler, indexing = ModuleType(_COMPILER), ModuleType(_INDEXING)
    compiler.__path__ = []  # a package
    for decorator in ("allow_in_graph", "assume_constant_result", "disable"):
        setattr(compiler, decorator, _mark)
    indexing.TransformGetItemToIndex = _transform_index  # type: ignore[attr-defined]
    sys.modules.update({_COMPILER: compiler, _INDEXING: indexing})
    try:
        with ExitStack() as replaced:
            replaced.enter_context(_replace(torch, "_dynamo", compiler))
            replaced.enter_context(_replace(torch.compiler, "allow_in_graph", _mark))
            replaced.enter_context(_replace(torch.compiler, "disable", _mark))
            yield
    finally:
        del sys.modules[_COMPILER], sys.modules[_INDEXING]


@contextmanager
def _replace(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """While inside, the module's attribute `name` is `value`. An attribute that the module makes when asked for it is
    not made."""
    before = vars(module).get(name)
    setattr(module, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(module, name)
        else:
            setattr(module, name, before)


def _mark(function: Callable[..., Any] | None = None, *settings: object, **named: object) -> Any:
    """The function itself: a decorator of functions that are never compiled, with settings or without."""
    return _mark if function is None else function


def _transform_index() -> Any:
    """What the class TransformGetItemToIndex makes, for the rare mask that needs it."""
    return importlib.import_module(_INDEXING).TransformGetItemToIndex()
