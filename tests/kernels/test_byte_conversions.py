"""The PTX that turns bytes of a quantised pool into float16, executed here instruction by instruction."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from coatcheck.kernels.kv import quantise

BYTES = [[i, (i * 7 + 3) % 256, 255 - i, (i * 31 + 128) % 256] for i in range(256)]


def executed(code: str, word: int, outputs: int) -> list[float]:
    """The float16 numbers that the code leaves in its outputs, for one register of four bytes."""
    registers = {f"${outputs}": word}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in code.strip("{} ").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        if name == "mov.b32" and rest.startswith("{"):
            low, high, source = re.findall(r"[\w$]+", rest)
            registers[low], registers[high] = value(source) & 0xFFFF, value(source) >> 16
            continue
        target, *arguments = (part.strip() for part in rest.split(","))
        x, *others = map(value, arguments)
        registers[target] = instruction(name, x, *others)
    words = np.array([registers[f"${i}"] for i in range(outputs)], dtype=np.uint32)
    return [float(half) for half in words.view(np.float16)]


def instruction(name: str, x: int, *others: int) -> int:
    if name == "mov.b32":
        return x
    if name == "cvt.rn.f16x2.e4m3x2":
        pair = torch.tensor([x & 255, x >> 8], dtype=torch.uint8).view(torch.float8_e4m3fn).half()
        return int(pair.view(torch.int32)) & 0xFFFFFFFF
    y = others[0]
    if name == "prmt.b32":
        bytes_ = [*x.to_bytes(4, "little"), *y.to_bytes(4, "little")]
        return int.from_bytes(bytes(bytes_[others[1] >> 4 * i & 7] for i in range(4)), "little")
    if name.endswith("f16x2"):
        one, other = (np.array([word], dtype=np.uint32).view(np.float16) for word in (x, y))
        return int((one * other if name.startswith("mul") else one - other).view(np.uint32)[0])
    return {"and.b32": x & y, "or.b32": x | y, "xor.b32": x ^ y, "shr.u32": x >> y}[name]


@pytest.mark.parametrize("code", [quantise._PTX_FP8, quantise._PTX_FP8_SHIFTS])
def test_every_e4m3_byte_means_what_torch_says(code: Any) -> None:
    """Every e4m3 byte but the two NaNs has torch's value, in each of the four places of a register."""
    for four in BYTES:
        want = torch.tensor(four, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        have = torch.tensor(executed(code.value, int.from_bytes(bytes(four), "little"), 2))
        assert torch.equal(have[~want.isnan()], want[~want.isnan()]), four


def test_every_integer_keeps_its_value() -> None:
    """int8 bytes are two's complement. The low and the high nibbles of int4 bytes are their value minus 8."""
    for four in BYTES:
        word = int.from_bytes(bytes(four), "little")
        assert executed(quantise._PTX_INT8.value, word, 2) == [float(np.int8(np.uint8(byte))) for byte in four]
        nibbles = [(byte & 15) - 8.0 for byte in four] + [(byte >> 4) - 8.0 for byte in four]
        assert executed(quantise._PTX_INT4.value, word, 4) == nibbles
