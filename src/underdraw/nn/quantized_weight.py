"""Weight-only quantisation: matrices as bytes with float32 scales, int8 and fp8 per output, int4 per group of inputs.

All formats are symmetric, so a zero weight stays zero. Values are stored as integers in every format, so that a
module's `.to(dtype)` does not touch them. An int4 byte holds an input of an even group in its lower half and the same
input of the next group in its upper half. On a GPU values are words of 16 bits, for `kernels.quantized_gemm`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeGuard, get_args

import torch
from torch import Tensor

QuantizedFormat = Literal["int8", "fp8", "int4"]
WeightFormat = Literal["full", "int8", "fp8", "int4"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)
GROUP = 128  # inputs that share a scale in int4
_PLANE_WIDTH = 64  # inputs of a plane of words on a GPU
_MIN_GROUP = 16  # matrices whose number of inputs is not a multiple of this stay as they are
_LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}  # largest magnitudes; int4 has -8 too, for clipped values
_STORED: dict[QuantizedFormat, torch.dtype] = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int4": torch.uint8,
}  # dtypes of values in files
_CLIPPED_SHARES = (1.0, 0.925, 0.85, 0.775)  # of the largest magnitude of an int4 group
_TINY = 1e-12  # smallest scale, for rows of zeros


def is_quantized(weight_format: str) -> TypeGuard[QuantizedFormat]:
    return weight_format in get_args(QuantizedFormat)


def group_size(inputs: int) -> int:
    """Inputs that share a scale in int4: 128, or the largest power of two below it that divides `inputs`."""
    return min(GROUP, inputs & -inputs)


def plane_width(inputs: int) -> int:
    """Inputs of a plane of words: 64, or the largest power of two below it that divides `inputs`."""
    return min(_PLANE_WIDTH, inputs & -inputs)


def can_quantize(inputs: int) -> bool:
    return inputs % _MIN_GROUP == 0


class QuantizedWeight(NamedTuple):
    """A matrix (out, in) as bytes and scales. On a CPU the bytes may be packed, which `dequantize` keeps.

    On a GPU they are int16 words (out, W): blocks of two planes of `plane_width` inputs, of int4 four planes, whose
    values share a word, the first in the lowest bits.
    """

    values: Tensor  # uint8 (out, in), of int4 (out, P * group) with P pairs of groups; packed (packs, in, width)
    scale: Tensor  # float32 (out,); of int4 (out, 2 P), 0 for a group past the last input
    inputs: int
    format: QuantizedFormat

    def pack(self, width: int) -> QuantizedWeight:
        """The same with `width` outputs side by side, input-major, one pack after the other."""
        packs = self.values.view(-1, width, self.values.shape[1]).transpose(1, 2)
        return self._replace(values=packs.contiguous())

    def unpack(self) -> QuantizedWeight:
        """The same with bytes (out, in)."""
        values = self.values
        if values.ndim == 3:
            values = values.transpose(1, 2).flatten(0, 1)
        elif values.dtype == torch.int16:
            values = self._pair_groups(self._from_words())
        return self._replace(values=values)

    def to_words(self) -> QuantizedWeight:
        """The same with values in words."""
        if self.values.dtype == torch.int16:
            return self
        codes, planes, width = self._split_groups(self.unpack().values), self._planes, plane_width(self.inputs)
        padded = torch.nn.functional.pad(codes, (0, -self.inputs % (planes * width)))
        parts = padded.view(len(codes), -1, planes, width).unbind(2)
        halves = [parts[0] | parts[1] << 4, parts[2] | parts[3] << 4] if planes == 4 else parts
        words = torch.stack([*halves], -1).view(torch.int16)  # the first half in the lower byte
        return self._replace(values=words.view(len(codes), -1))

    @property
    def _planes(self) -> int:
        return 4 if self.format == "int4" else 2

    def _from_words(self) -> Tensor:
        """The codes (out, in) of words, one in a byte."""
        outputs, width = len(self.values), plane_width(self.inputs)
        parts = [*self.values.view(torch.uint8).view(outputs, -1, width, 2).unbind(-1)]
        if self._planes == 4:
            parts = [parts[0] & 15, parts[0] >> 4, parts[1] & 15, parts[1] >> 4]
        return torch.stack(parts, 2).view(outputs, -1)[:, : self.inputs]

    def _split_groups(self, values: Tensor) -> Tensor:
        """One code (out, in) in a byte, from the pairs of int4."""
        if self.format != "int4":
            return values
        halves = values.view(len(values), self.scale.shape[1] // 2, -1)
        return torch.stack([halves & 15, halves >> 4], 2).view(len(values), -1)[:, : self.inputs]

    def _pair_groups(self, codes: Tensor) -> Tensor:
        """The inverse of `_split_groups`."""
        if self.format != "int4":
            return codes.contiguous()
        pairs, group = self.scale.shape[1] // 2, group_size(self.inputs)
        padded = torch.nn.functional.pad(codes, (0, 2 * pairs * group - self.inputs), value=8)
        even, odd = padded.view(len(codes), pairs, 2, group).unbind(2)
        return (even | odd << 4).reshape(len(codes), -1)

    def dequantize(self) -> Tensor:
        """The float32 matrix (out, in), or packed (packs, in, width)."""
        if self.values.dtype == torch.int16:
            return self.unpack().dequantize()
        packs = self.values if self.values.ndim == 3 else self.values.t()[None]  # (packs, in, width)
        count, _, width = packs.shape
        if self.format == "int4":
            pairs = self.scale.shape[1] // 2
            halves = packs.unflatten(1, (pairs, -1))
            codes = torch.stack([halves & 15, halves >> 4], 2).float() - 8  # (packs, P, 2, group, width)
            scale = self.scale.view(count, width, pairs, 2).permute(0, 2, 3, 1)[..., None, :]
            matrix = (codes * scale).flatten(1, 3)[:, : self.inputs]
        else:
            dtype = torch.int8 if self.format == "int8" else torch.float8_e4m3fn
            matrix = packs.view(dtype).float() * self.scale.view(count, 1, width)
        return matrix if self.values.ndim == 3 else matrix[0].t()

    def to_stored(self) -> tuple[Tensor, Tensor]:
        """Values and scales as they are written to files; the format follows from the dtype of the values."""
        matrix = self.unpack()
        return matrix.values.view(_STORED[self.format]).cpu().contiguous(), matrix.scale.cpu().contiguous()

    @classmethod
    def from_stored(cls, values: Tensor, scale: Tensor) -> QuantizedWeight:
        """A matrix as `to_stored` wrote it."""
        weight_format = next((name for name, dtype in _STORED.items() if dtype == values.dtype), None)
        if weight_format is None or values.ndim != 2 or len(scale) != len(values):
            raise ValueError(f"no quantised matrix: {values.dtype} {tuple(values.shape)}, scales {tuple(scale.shape)}")
        inputs = values.shape[1]
        if weight_format == "int4":
            pairs = scale.shape[1] // 2
            inputs = inputs // pairs * int((scale[0] > 0).sum())
        return cls(values.view(torch.uint8), scale.float(), inputs, weight_format)


def storage_shapes(
    outputs: int, inputs: int, weight_format: QuantizedFormat
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the bytes and of the scales of a matrix."""
    if weight_format != "int4":
        return (outputs, inputs), (outputs,)
    group = group_size(inputs)
    pairs = -(-inputs // (2 * group))
    return (outputs, pairs * group), (outputs, 2 * pairs)


def _clip_groups(groups: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Scales and codes 0 to 15 of int4 groups (..., inputs): of some scales the one with the least squared error.

    With 15 steps, clipping the largest weights of a group costs less than the coarser steps that they would need.
    """
    full = groups.abs().amax(-1, keepdim=True).clamp(min=_TINY) / largest
    best_error = torch.full_like(full, torch.inf)
    scale, codes = full, torch.zeros_like(groups)
    for share in _CLIPPED_SHARES:
        values = (groups / (full * share)).round_().clamp_(-8, 7)
        error = (values * (full * share) - groups).square_().sum(-1, keepdim=True)
        is_better = error < best_error
        scale, codes = torch.where(is_better, full * share, scale), torch.where(is_better, values, codes)
        best_error = torch.minimum(error, best_error)
    return scale[..., 0].contiguous(), (codes + 8).to(torch.uint8)


def quantize(weight: Tensor, weight_format: QuantizedFormat) -> QuantizedWeight:
    """Round a matrix (out, in) to the nearest values of a format; int4 may clip the largest of a group."""
    rows, (outputs, inputs) = weight.detach().float(), weight.shape
    largest = _LARGEST[weight_format]
    if weight_format != "int4":
        scale = rows.abs().amax(1).clamp(min=_TINY) / largest
        scaled = rows / scale[:, None]
        narrow = scaled.round().to(torch.int8) if weight_format == "int8" else scaled.to(torch.float8_e4m3fn)
        return QuantizedWeight(narrow.view(torch.uint8), scale, inputs, weight_format)
    group = group_size(inputs)
    pairs = -(-inputs // (2 * group))
    groups = torch.nn.functional.pad(rows, (0, 2 * pairs * group - inputs)).view(outputs, pairs, 2, group)
    scale, codes = _clip_groups(groups, largest)  # (out, P, 2) and (out, P, 2, group)
    values = (codes[:, :, 0] | codes[:, :, 1] << 4).view(outputs, pairs * group)
    scale = scale.view(outputs, 2 * pairs)
    scale[:, inputs // group :] = 0
    return QuantizedWeight(values, scale, inputs, weight_format)
