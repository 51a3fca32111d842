"""Triton's interpreter with matrix products whose rows do not depend on their place in the tile, with the minima and
maxima of GPUs, and with less work.

Products: on a GPU each row of a tile has the same order of summation, and our kernels' batch invariance rests on that.
The interpreter calls numpy's matmul. Its BLAS may sum the last rows of a tile in another order than the first rows:
OpenBLAS does so on processors with AVX2 alone. numpy's einsum has one loop for all rows.

Minima and maxima: on a GPU tl.minimum and tl.maximum drop a NaN unless a kernel asks for it. The interpreter keeps it.

Work: the interpreter patches triton.language again at every call of a device function, and builds a table of types for
every tensor. Both took 40% of the time of our kernels there. Two thirds of the rest were for the types of blocks, which
are built and checked again for every tensor, and for a second computation of each integer sum and product in int64,
which finds overflows.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def mend_products() -> None:
    """Replace the interpreter's matrix products, for the rest of this process."""
    interpreter.np = _NumpyWithOrderedProducts()


def mend_minima() -> None:
    """Let tl.minimum and tl.maximum drop a NaN as on a GPU, for the rest of this process."""
    builder: Any = interpreter.InterpreterBuilder
    builder.create_minnumf = lambda self, left, right: self.binary_op(left, right, np.fmin)
    builder.create_maxnumf = lambda self, left, right: self.binary_op(left, right, np.fmax)


class _NumpyWithOrderedProducts:
    """numpy, with another matmul."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        setattr(self, name, found)  # the next look-up finds the attribute
        return found

    def matmul(self, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], dtype: Any = None) -> np.ndarray[Any, Any]:
        """a: [..., M, K]. b: [..., K, N]. Return [..., M, N]."""
        product: np.ndarray[Any, Any] = np.einsum("...ik,...kj->...ij", a, b, dtype=dtype, casting="unsafe")
        return product


class _LastingPatches:
    """The patches of a launch, which stay: nothing in this process compiles kernels."""

    def restore(self) -> None: ...


def reduce_work() -> None:
    """Patch triton.language once for each set of names that kernels see it by, keep the table of types, and build the
    types of blocks once, for the rest of this process."""
    patch, look_up = interpreter._patch_lang, interpreter._get_np_dtype
    seen: set[tuple[bool, bool]] = set()
    types: dict[str, Any] = {}

    def patch_lang(function: Any) -> _LastingPatches:
        names = function.__globals__.values()
        visible = any(value is tl for value in names), any(value is tl.core for value in names)
        if visible not in seen:
            patch(function)
            seen.add(visible)
        return _LastingPatches()

    def numpy_type(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in types:
            types[name] = look_up(dtype)
        return types[name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_lang, numpy_type
    _share_types()
    _broadcast_by_sizes()
    _call_without_wrappers()
    if "TEST_ALL" not in os.environ:
        _skip_overflow_check()


def _share_types() -> None:
    """Build each type of blocks once. Equal types have one dictionary of attributes, which also holds what all tensors
    of the type have in common."""
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    made: dict[tuple[Any, ...], dict[str, Any]] = {}

    def initialise_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        attributes = made.get(key)
        if attributes is None:
            make_type(self, element_ty, list(shape))
            attributes = made[key] = {**vars(self), "sizes": tuple(self.shape)}
        self.__dict__ = attributes

    def initialise_tensor(self: Any, handle: Any, type: Any) -> None:
        shared = vars(type).get("of_tensors")
        if shared is None:
            make_tensor(self, handle, type)
            shared = type.of_tensors = {**vars(self)}
        vars(self).update(shared)
        self.handle = handle
        self.type = type

    tl.block_type.__init__, tl.tensor.__init__ = initialise_type, initialise_tensor
    tl.dtype.__eq__ = _or_identity(tl.dtype.__eq__)
    tl.block_type.__eq__ = _or_identity(tl.block_type.__eq__)


def _or_identity(equals: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: self is other or equals(self, other)


def _broadcast_by_sizes() -> None:
    """Broadcast scalars and blocks of one rank by the tuples of their sizes, as views of their data."""
    broadcast = TritonSemantic.broadcast_impl_value

    def expand(value: Any, sizes: tuple[int, ...]) -> Any:
        data = value.handle.data
        if data.size == 1:  # in a tenth of broadcast_to's time
            view: Any = np.ndarray(sizes, data.dtype, data, 0, (0,) * len(sizes))
        else:
            view = np.broadcast_to(data, sizes)
        return tl.tensor(interpreter.TensorHandle(view, value.handle.dtype.scalar), tl.block_type(value.dtype, sizes))

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = vars(lhs.type).get("sizes"), vars(rhs.type).get("sizes")  # a scalar type has no sizes
        if left == right:
            return lhs, rhs
        if right is None:
            return lhs, expand(rhs, left)
        if left is None:
            return expand(lhs, right), rhs
        if len(left) != len(right) or any(a != b and 1 not in (a, b) for a, b in zip(left, right, strict=True)):
            return broadcast(self, lhs, rhs)
        sizes = tuple(map(max, left, right))
        return lhs if left == sizes else expand(lhs, sizes), rhs if right == sizes else expand(rhs, sizes)

    TritonSemantic.broadcast_impl_value = broadcast_impl_value


def _call_without_wrappers() -> None:
    """Call each function of triton.language directly: its wrapper only checks that it is called by a kernel."""

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return function(*arguments, **options)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch_attribute


def _skip_overflow_check() -> None:
    """Compute each sum and product of integers only once, without the second one in int64 that finds overflows. So only
    `make test-all`, which does not call this function, finds an int32 overflow."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
