"""Checkpoints that come quantised (AWQ, GPTQ, FP8): several stored tensors become one weight that the packer knows.

AWQ and GPTQ in 4 bits become Q4_1 blocks with the checkpoint's own quants: w = s (q - z) = s q + m, with m = -s z
rounded to half precision (exact for z = 8 and other short products). Groups are multiples of 32, so no block straddles.
FP8 becomes bf16: value times scale in float32, rounded once. Scales of activations are not used: ours are not FP8.

Nothing is converted before it is packed, and each weight is let go afterwards. A weight is made in slabs of its
outputs, on a thread a core: numpy lets go of the interpreter's lock, and what a slab needs beside its result is little.
What cannot be converted is refused by the field or the tensor's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..ops.dequantize import bf16_bits, dequantize, row_bytes
from ..ops.interface import SourceTensor
from ..ops.machine import usable_cores
from .fields import Fields
from .stored import StoredTensor

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Tensors = Mapping[str, StoredTensor]

FIELD = "quantization_config"
_GROUP = 32
STEP = 8                  # outputs that share a word of an AWQ weight or of zero points: no slab may part them
_SLAB_VALUES = 1 << 18    # weights of one slab, about
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)      # the nibble of an AWQ word that holds output 0, 1, ... of its eight
_FP8_COMPANIONS = ("weight_scale", "weight_scale_inv", "input_scale", "activation_scale")
_NOTHING = np.empty(0, np.uint8)


class DeferredSource(SourceTensor):
    """A SourceTensor whose bytes are made on each access to `raw`."""

    __slots__ = ("_make",)

    def __init__(self, tensor: ConvertedTensor, row_order: NDArray[np.int64] | None, first: int, last: int) -> None:
        for name, value in (("name", tensor.name), ("num_outputs", last - first), ("num_inputs", tensor.shape[1]),
                            ("source_type", tensor.source_type), ("row_order", row_order), ("origin", tensor.origin),
                            ("_make", partial(tensor.made, first, last))):
            object.__setattr__(self, name, value)

    @property
    def raw(self) -> Bytes:
        made: Bytes = self._make()    # type: ignore[attr-defined]
        return made


@dataclass(frozen=True, slots=True)
class ConvertedTensor(StoredTensor):
    """make(first, last) gives the bytes of some outputs, uint8 [outputs, bytes per output]; first is a multiple of
    STEP. raw is empty."""

    origin: str
    make: Callable[[int, int], Bytes]

    def made(self, first: int, last: int) -> Bytes:
        """The bytes of outputs [first, last), made in slabs on several threads."""
        num_inputs = self.shape[1]
        out = np.empty((last - first, row_bytes(self.source_type, num_inputs)), np.uint8)
        size = max(1, _SLAB_VALUES // num_inputs // STEP) * STEP
        starts = range(first // STEP * STEP, last, size)

        def make_slab(start: int) -> None:
            end = min(start + size, last)
            skipped = max(first - start, 0)    # of a slab that begins before what is asked for
            out[start + skipped - first : end - first] = self.make(start, end)[skipped:]

        with ThreadPoolExecutor(min(len(starts), usable_cores())) as threads:
            for _ in threads.map(make_slab, starts):    # raises what a slab raised
                pass
        return out

    def to_matrix(self, row_order: NDArray[np.int64] | None = None) -> SourceTensor:
        return DeferredSource(self, row_order, 0, self.shape[0])

    def rows_to_matrix(self, first: int, last: int) -> SourceTensor:
        return DeferredSource(self, None, first, last)


def plain_checkpoint(config: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    """The config without quantization_config, and one tensor for each weight, as families.py expects them."""
    if not config.has(FIELD):
        return config, tensors
    settings = config.mapping(FIELD)
    method = settings.text("quant_method")
    if method not in METHODS:
        raise settings.refuse("quant_method", f"unknown; supported: {', '.join(METHODS)}")
    kept = {name: value for name, value in config.values.items() if name != FIELD}
    return Fields(kept, config.where), METHODS[method](settings, tensors)


# ---- four bits

@dataclass(frozen=True, slots=True)
class _FourBits:
    """A quantised linear as stored."""

    qweight: StoredTensor
    qzeros: StoredTensor
    scales: StoredTensor
    group_size: int
    num_inputs: int
    num_outputs: int
    zero_offset: int        # true zero point - stored one


def _awq(settings: Fields, tensors: Tensors) -> Tensors:
    _need_four_bits(settings)
    if settings.text("version", "gemm").lower() != "gemm":
        raise settings.refuse("version", "only 'gemm' is supported")
    if not settings.flag("zero_point", True):
        raise settings.refuse("zero_point", "checkpoints without zero points are not supported")
    return _four_bit_tensors(settings, tensors, zero_offset=0, inputs_per_word=1)


def _gptq(settings: Fields, tensors: Tensors) -> Tensors:
    _need_four_bits(settings)
    layout = settings.text("checkpoint_format", settings.text("format", "gptq")).lower()
    if layout not in ("gptq", "gptq_v2"):
        raise settings.refuse("checkpoint_format", "only 'gptq' and 'gptq_v2' are supported")
    _refuse_act_order(settings, tensors)
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(".g_idx")}
    return _four_bit_tensors(settings, kept, zero_offset=1 if layout == "gptq" else 0, inputs_per_word=8)


def _need_four_bits(settings: Fields) -> None:
    if settings.integer("bits", settings.integer("w_bit", 4)) != 4:
        raise settings.refuse("bits", "only 4 is supported")


def _refuse_act_order(settings: Fields, tensors: Tensors) -> None:
    """desc_act is harmless where the groups turn out to be in order all the same."""
    indices = [tensor for name, tensor in tensors.items() if name.endswith(".g_idx")]
    is_act_order = settings.flag("desc_act", False)
    if is_act_order and not indices:
        raise settings.refuse("desc_act", "act-order needs the g_idx tensors, which are missing")
    for tensor in indices:
        _need(tensor, (tensor.shape[0],) if tensor.shape else (0,), ("I32",))
        group_size = settings.integer("group_size")
        in_order = np.arange(tensor.shape[0]) // (group_size if group_size > 0 else max(tensor.shape[0], 1))
        if not np.array_equal(tensor.raw.view("<i4"), in_order):
            raise settings.refuse("desc_act", f"act-order checkpoints are not supported ({tensor.name} is not in "
                                  "order)")


def _four_bit_tensors(settings: Fields, tensors: Tensors, zero_offset: int, inputs_per_word: int) -> Tensors:
    plain: dict[str, StoredTensor] = {}
    parts = {name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")}
    if not parts:
        raise settings.refuse("quant_method", "the weights hold no .qweight tensors")
    for name, tensor in tensors.items():
        at, _, kind = name.rpartition(".")
        if at not in parts or kind not in ("qweight", "qzeros", "scales"):
            plain[name] = tensor
        elif kind == "qweight":
            linear = _four_bit_linear(settings, tensors, at, zero_offset, inputs_per_word)
            make = partial(_awq_blocks if inputs_per_word == 1 else _gptq_blocks, linear)
            plain[at + ".weight"] = ConvertedTensor(at + ".weight", (linear.num_outputs, linear.num_inputs), "Q4_1",
                                                    _NOTHING, "AWQ" if inputs_per_word == 1 else "GPTQ", make)
    return plain


def _four_bit_linear(settings: Fields, tensors: Tensors, at: str, zero_offset: int, inputs_per_word: int) -> _FourBits:
    missing = [name for name in (at + ".qzeros", at + ".scales") if name not in tensors]
    if missing:
        raise ModelError(f"{settings.where}: tensor {missing[0]} is missing beside {at}.qweight")
    qweight, qzeros, scales = (tensors[f"{at}.{kind}"] for kind in ("qweight", "qzeros", "scales"))
    if len(qweight.shape) != 2:
        raise ModelError(f"tensor {qweight.name}: shape {list(qweight.shape)}, two dimensions are needed")
    num_inputs, num_outputs = qweight.shape[0] * inputs_per_word, qweight.shape[1] * (8 if inputs_per_word == 1 else 1)
    group_size = settings.integer("group_size", settings.integer("q_group_size", 128))
    group_size = num_inputs if group_size == -1 else group_size
    if group_size < _GROUP or group_size % _GROUP or num_inputs % group_size or num_outputs % 8:
        raise settings.refuse("group_size", f"must be a multiple of {_GROUP} that divides the {num_inputs} inputs of "
                              f"{at}, and its {num_outputs} outputs a multiple of 8")
    _need(qweight, qweight.shape, ("I32",))
    _need(qzeros, (num_inputs // group_size, num_outputs // 8), ("I32",))
    _need(scales, (num_inputs // group_size, num_outputs), ("F16", "BF16", "F32"))
    return _FourBits(qweight, qzeros, scales, group_size, num_inputs, num_outputs, zero_offset)


def _need(tensor: StoredTensor, shape: tuple[int, ...], kinds: tuple[str, ...]) -> None:
    if tensor.shape != shape or tensor.source_type not in kinds:
        raise ModelError(f"tensor {tensor.name}: {tensor.source_type} of shape {list(tensor.shape)}, needs "
                         f"{' or '.join(kinds)} of shape {list(shape)}")


def _awq_blocks(linear: _FourBits, first: int, last: int) -> Bytes:
    quants = np.ascontiguousarray(_outputs_of_words(linear.qweight, _AWQ_ORDER, first, last).T)    # [outputs, inputs]
    halves = quants.reshape(last - first, -1, 2, 16)
    nibbles: Bytes = halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)
    return _q4_1(linear, _outputs_of_words(linear.qzeros, _AWQ_ORDER, first, last), nibbles, first)


def _gptq_blocks(linear: _FourBits, first: int, last: int) -> Bytes:
    words = np.ascontiguousarray(linear.qweight.raw.view("<u4").reshape(linear.qweight.shape)[:, first:last].T)
    pairs = words.view(np.uint8).reshape(last - first, -1, 2, 8)           # a byte: inputs 2k (low nibble) and 2k + 1
    low, high = pairs[:, :, 0], pairs[:, :, 1]                             # inputs 0 to 15 and 16 to 31 of a group
    nibbles: Bytes = np.stack([low & 15 | high << 4, low >> 4 | high & 0xF0], axis=3).astype(np.uint8)
    zeros = _outputs_of_words(linear.qzeros, range(8), first, last)
    return _q4_1(linear, zeros, nibbles.reshape(last - first, -1, 16), first)


def _outputs_of_words(tensor: StoredTensor, nibble_of_output: tuple[int, ...] | range, first: int, last: int) -> Bytes:
    """Outputs [first, last) as columns; a word of the last axis holds eight of them."""
    words = tensor.raw.view("<u4").reshape(tensor.shape)[:, first // 8 : -(-last // 8)]
    nibbles = np.empty((*words.shape, 8), np.uint8)
    for output, nibble in enumerate(nibble_of_output):
        nibbles[:, :, output] = words >> np.uint32(4 * nibble) & np.uint32(15)
    return nibbles.reshape(len(words), -1)[:, : last - first]


def _q4_1(linear: _FourBits, zeros: Bytes, nibbles: Bytes, first: int) -> Bytes:
    """zeros [groups, outputs], nibbles [outputs, blocks, 16], outputs from `first` on -> Q4_1 rows."""
    num_outputs = len(nibbles)
    with np.errstate(over="ignore"):     # packing refuses what is not finite
        d = _columns(linear.scales, first, first + num_outputs).astype(np.float16)
        m = (-d.astype(np.float32) * (zeros.astype(np.float32) + np.float32(linear.zero_offset))).astype(np.float16)
    blocks = np.empty((num_outputs, linear.num_inputs // _GROUP, 20), np.uint8)
    for offset, numbers in ((0, d), (2, m)):
        per_block = np.repeat(np.ascontiguousarray(numbers.T), linear.group_size // _GROUP, axis=1)
        blocks[:, :, offset : offset + 2] = per_block[..., None].view(np.uint8)
    blocks[:, :, 4:] = nibbles
    return blocks.reshape(num_outputs, -1)


def _columns(tensor: StoredTensor, first: int, last: int) -> F32:
    """The values of some columns of a matrix of plain numbers."""
    rows, columns = tensor.shape
    raw = tensor.raw.reshape(rows, columns, -1)[:, first:last].reshape(rows, -1)
    return dequantize(SourceTensor(tensor.name, rows, last - first, tensor.source_type, raw))


# ---- eight-bit floats

def _fp8(settings: Fields, tensors: Tensors) -> Tensors:
    layout = settings.text("format", "float-quantized")
    if layout not in ("float-quantized", "naive-quantized"):
        raise settings.refuse("format", "only 8-bit floats ('float-quantized') are supported")
    plain: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        at, _, kind = name.rpartition(".")
        if kind in _FP8_COMPANIONS and at + ".weight" in tensors:
            continue
        if tensor.source_type == "F8_E4M3":
            tensor = _fp8_tensor(settings, tensors, at, tensor)
        plain[name] = tensor
    return plain


def _fp8_tensor(settings: Fields, tensors: Tensors, at: str, tensor: StoredTensor) -> StoredTensor:
    """weight_scale_inv is, despite its name, a factor like weight_scale: one for each block of the weight."""
    scale = tensors.get(at + ".weight_scale_inv", tensors.get(at + ".weight_scale"))
    if scale is None or len(tensor.shape) != 2:
        raise ModelError(f"tensor {tensor.name}: F8_E4M3 needs two dimensions and a weight_scale or weight_scale_inv")
    rows, columns = tensor.shape
    block = settings.values.get("weight_block_size") or [128, 128]
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise settings.refuse("weight_block_size", "must be two positive integers")
    by_shape = {(): (rows, columns), (1,): (rows, columns), (rows,): (1, columns), (rows, 1): (1, columns),
                (1, 1): (rows, columns), (-(-rows // block[0]), -(-columns // block[1])): tuple(block)}
    if scale.shape not in by_shape or scale.source_type not in ("F32", "F16", "BF16"):
        raise ModelError(f"tensor {scale.name}: {scale.source_type} of shape {list(scale.shape)} fits no scaling of "
                         f"{tensor.name} {list(tensor.shape)}: by tensor, by row or by blocks of {block}")
    height, width = by_shape[scale.shape]
    return ConvertedTensor(tensor.name, tensor.shape, "BF16", _NOTHING, "F8_E4M3",
                           partial(_fp8_to_bf16, tensor, scale, height, width))


def _fp8_to_bf16(tensor: StoredTensor, scale: StoredTensor, height: int, width: int, first: int, last: int) -> Bytes:
    """Of each block of the scaling, the 256 values a code can stand for are rounded once and looked up."""
    rows, columns = tensor.shape
    grid = (-(-rows // height), -(-columns // width))
    factors = dequantize(SourceTensor(scale.name, 1, grid[0] * grid[1], scale.source_type, scale.raw.reshape(1, -1)))
    codes = tensor.raw.reshape(tensor.shape)
    out = np.empty((last - first, columns), np.uint16)
    for block in range(first // height, -(-last // height)):
        top, bottom = max(first, block * height), min(last, (block + 1) * height)
        tables = bf16_bits(FP8_VALUES * factors.reshape(grid)[block][:, None])    # [blocks side by side, 256]
        for index, table in enumerate(tables):
            inside = slice(index * width, (index + 1) * width)
            out[top - first : bottom - first, inside] = table[codes[top:bottom, inside]]
    return out.view(np.uint8)


def _fp8_values() -> F32:
    """E4M3 without infinities: bias 7, subnormals of 2^-9, NaN where all seven bits are set."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8.0 + mantissa, exponent - 10))
    magnitude[(code & 127) == 127] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


FP8_VALUES = _fp8_values()
METHODS: dict[str, Callable[[Fields, Tensors], Tensors]] = {
    "awq": _awq, "gptq": _gptq, "fp8": _fp8, "fbgemm_fp8": _fp8, "compressed-tensors": _fp8,
}
