"""Codes, scales and zero points of every type, and the values that the gguf package gives for the same blocks."""

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize

from coatcheck.workers.gguf.block_codes import FORMS, BlockCodes, CodeForm, Kind, dequantise, read_codes
from tests.workers.gguf.gguf_files import quantise

INTEGERS = [kind for kind, form in FORMS.items() if form.kind is not Kind.FP4]


def values_of(codes: BlockCodes) -> np.ndarray:
    """(code - zero) × scale in float32."""
    group = codes.codes.shape[1] // codes.scales.shape[1]
    scales = codes.scales.astype(np.float32).repeat(group, axis=1)
    zeros = 0 if codes.zeros is None else codes.zeros.repeat(group, axis=1)
    values: np.ndarray = (codes.codes.astype(np.float32) - zeros) * scales
    return values


def rows_of(kind: Type) -> np.ndarray:
    """Some rows of a type; one of its blocks is flat."""
    values = np.random.default_rng(kind).normal(size=(6, 512)).astype(np.float32)
    values[2, :256] = 0
    values[3, :256] = 1.5
    return quantise(values, kind, seed=3)


@pytest.mark.parametrize("kind", INTEGERS, ids=lambda kind: kind.name)
def test_codes_give_the_values_of_the_package(kind: Type) -> None:
    """Bit for bit without minima. With them within two roundings of float32, relative to the group's largest value."""
    rows, form = rows_of(kind), FORMS[kind]
    codes, wanted = read_codes(kind, rows), dequantize(rows, kind)
    assert np.array_equal(dequantise(kind, rows), wanted)
    assert codes.codes.dtype == np.int8 and (codes.zeros is not None) == form.has_zeros
    assert codes.scales.shape == (6, 512 // form.group)
    if form.kind is Kind.INT4:
        assert codes.codes.min() >= -8 and codes.codes.max() <= 7
    found = values_of(codes)
    assert np.isfinite(found).all()
    if form.has_zeros:
        largest = np.abs(wanted).reshape(6, -1, form.group).max(2, keepdims=True).repeat(form.group, 2)
        assert (np.abs(found - wanted) <= 2**-21 * largest.reshape(wanted.shape)).all()
    else:
        assert np.array_equal(found, wanted)


def test_groups_whose_scale_is_zero_have_their_minimum() -> None:
    """quantise() makes such groups of Q4_K."""
    rows = rows_of(Type.Q4_K)
    codes = read_codes(Type.Q4_K, rows)
    assert codes.zeros is not None
    flat = (codes.zeros == 1) & (codes.codes.reshape(6, -1, 32) == 0).all(2)
    assert flat.sum() >= 8
    assert np.array_equal(
        values_of(codes)[flat.repeat(32, axis=1)], dequantize(rows, Type.Q4_K)[flat.repeat(32, axis=1)]
    )


@pytest.mark.parametrize("pair", [(Type.Q4_K, Type.Q6_K), (Type.Q4_0, Type.Q8_0), (Type.Q5_0, Type.Q6_K)])
def test_a_common_form_keeps_the_values(pair: tuple[Type, Type]) -> None:
    """Weights of two types in the form that both have are equal to before."""
    common = FORMS[pair[0]].common(FORMS[pair[1]])
    assert common is not None and common == FORMS[pair[1]].common(FORMS[pair[0]])
    for kind in pair:
        codes = read_codes(kind, rows_of(kind))
        changed = codes.in_form(FORMS[kind], common)
        assert (changed.zeros is not None) == common.has_zeros
        assert changed.scales.shape[1] == 512 // common.group
        assert np.array_equal(values_of(changed), values_of(codes))


def test_floats_have_no_common_form_with_integers() -> None:
    """MXFP4 stays as it is."""
    assert FORMS[Type.MXFP4].common(FORMS[Type.Q8_0]) is None
    assert FORMS[Type.MXFP4].common(FORMS[Type.MXFP4]) == CodeForm(Kind.FP4, 32, "U8")
