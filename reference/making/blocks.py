"""Loose blocks of every storage type and what they mean: needs `gguf` and `numpy` only.

`gguf` quantizes and dequantizes the older types; for the others, which it only dequantizes, blocks
are drawn directly and its dequantization says what they mean.
"""

import pathlib

import gguf
import numpy as np

Type = gguf.GGMLQuantizationType
OLDER = [Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1]
K_TYPES = [Type.Q4_K, Type.Q5_K, Type.Q6_K]
# Types whose bytes may be any, and where the scales of their blocks are (binary16).
ANY_BYTES = {
    Type.IQ4_NL: [0],
    Type.IQ4_XS: [0],
    Type.MXFP4: [],
}
# What scales are in turn: one of a model, the extremes, zero.
SCALES = [0.01, 65504.0, -65504.0, 2.0**-24, 0.0, -0.37, 2.0**-14]
# And exponents of MXFP4, of which the first two make subnormal scales.
EXPONENTS = [120, 0, 1, 2, 127, 128, 250]


# --- K blocks --------------------------------------------------------------------------------


def draw(random, kind: Type, count: int) -> np.ndarray:
    """Random valid blocks of a K type, values spread about 0.1 around zero."""
    return draw_q6_k(random, count) if kind == Type.Q6_K else draw_q45_k(random, kind, count)


def half(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).reshape(-1, 1).view(np.uint8)


def draw_q45_k(random, kind: Type, count: int) -> np.ndarray:
    levels = 16 if kind == Type.Q4_K else 32
    scales = random.integers(8, 64, (count, 8))
    minima = np.clip(scales + random.integers(-3, 4, (count, 8)), 0, 63)
    d = 0.1 / (36 * 0.29 * levels) * random.uniform(0.8, 1.2, count)
    parts = [half(d), half(d * (levels - 1) / 2), pack_scales(scales, minima)]
    if kind == Type.Q5_K:
        parts.append(random.integers(0, 256, (count, 32)))
    parts.append(random.integers(0, 256, (count, 128)))
    return np.concatenate(parts, axis=1).astype(np.uint8)


def pack_scales(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Eight scales and eight minima of six bits in twelve bytes."""
    low = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    middle = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    high = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    return np.concatenate([low, middle, high], axis=1)


def draw_q6_k(random, count: int) -> np.ndarray:
    bits = random.integers(0, 256, (count, 128 + 64))
    scales = random.integers(10, 60, (count, 16)) * random.choice([-1, 1], (count, 16))
    d = 0.1 / (37 * 18.5) * random.uniform(0.8, 1.2, count)
    return np.concatenate([bits, scales.astype(np.int8).view(np.uint8), half(d)], axis=1).astype(np.uint8)


# --- any blocks ------------------------------------------------------------------------------


def draw_any(random, kind: Type) -> np.ndarray:
    """A block of random bytes for each scale."""
    count = len(SCALES)
    data = random.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[kind][1])).astype(np.uint8)
    for index, at in enumerate(ANY_BYTES[kind]):
        data[:, at : at + 2] = half(np.roll(SCALES, index))
    if kind == Type.MXFP4:
        data[:, 0] = EXPONENTS
    return data


def make(folder: pathlib.Path) -> None:
    """A tensor of one row per type in `blocks.gguf`, all their values in that order in `blocks.f32`."""
    random = np.random.default_rng(77)
    writer = gguf.GGUFWriter(folder / "blocks.gguf", "blocks")
    values = []
    for kind in [Type.F32, Type.F16, Type.BF16, *OLDER, *K_TYPES, *ANY_BYTES]:
        if kind in K_TYPES:
            data = draw(random, kind, 2).reshape(1, -1)
        elif kind in ANY_BYTES:
            data = draw_any(random, kind).reshape(1, -1)
        else:
            data = gguf.quants.quantize(random.standard_normal((1, 128)).astype(np.float32), kind)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
        values.append(gguf.quants.dequantize(data, kind).ravel())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.concatenate(values).astype("<f4").tofile(folder / "blocks.f32")
