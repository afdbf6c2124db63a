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
    Type.Q2_K: [80, 82],
    Type.Q3_K: [108],
    Type.TQ1_0: [52],
    Type.TQ2_0: [64],
    Type.IQ3_S: [0],
    Type.IQ3_XXS: [0],
    Type.IQ2_S: [0],
    Type.IQ2_XS: [0],
    Type.IQ2_XXS: [0],
}
# Types whose weights are points of a table: the blocks that take all points.
BLOCKS_OF_ALL = {Type.IQ3_S: 8, Type.IQ3_XXS: 4, Type.IQ2_S: 32, Type.IQ2_XS: 16, Type.IQ2_XXS: 8}
# What scales are in turn: one of a model, the extremes, zero.
SCALES = [0.01, 65504.0, -65504.0, 2.0**-24, 0.0, -0.37, 2.0**-14]
# And exponents of MXFP4, of which the first two make subnormal scales.
EXPONENTS = [120, 0, 1, 2, 127, 128, 250]


# --- K blocks --------------------------------------------------------------------------------


def draw(random, kind: Type, count: int) -> np.ndarray:
    """Random valid blocks, values spread about 0.1 around zero."""
    if kind in ANY_BYTES:
        return draw_spread(random, kind, count)
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


def draw_spread(random, kind: Type, count: int) -> np.ndarray:
    data = random.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[kind][1])).astype(np.uint8)
    if kind == Type.MXFP4:
        data[:, 0] = 122  # twice a float is 5.9 on average
        return data
    if kind == Type.Q2_K:  # minima that put the middle at zero
        data[:, :16] = (data[:, :16] & 15) * 17
    factors = [1, 1.5]
    for at, factor in zip(ANY_BYTES[kind], factors):
        data[:, at : at + 2] = half(np.full(count, factor))
    d = 0.1 / gguf.quants.dequantize(data, kind).std()
    for at, factor in zip(ANY_BYTES[kind], factors):
        data[:, at : at + 2] = half(np.full(count, d * factor))
    return data


def draw_any(random, kind: Type) -> np.ndarray:
    """Blocks of random bytes, one for each scale at least; of types with tables, all entries in turn."""
    count = max(len(SCALES), BLOCKS_OF_ALL.get(kind, 0))
    data = random.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[kind][1])).astype(np.uint8)
    for index, at in enumerate(ANY_BYTES[kind]):
        data[:, at : at + 2] = half(np.resize(np.roll(SCALES, index), count))
    if kind == Type.MXFP4:
        data[:, 0] = EXPONENTS
    if kind in BLOCKS_OF_ALL:
        name_all_points(kind, data)
    return data


def name_all_points(kind: Type, data: np.ndarray) -> None:
    """Lets the indices of the points be all there are, in turn."""
    per_block = 64 if kind in (Type.IQ3_S, Type.IQ3_XXS) else 32
    indices = np.arange(data.shape[0] * per_block).reshape(-1, per_block)
    low, high = indices % 256, indices // 256
    if kind == Type.IQ2_XXS:
        data[:, 2:66].reshape(-1, 8, 8)[:, :, :4] = low.reshape(-1, 8, 4)
    elif kind == Type.IQ2_XS:
        words = data[:, 2:66].reshape(-1, 32, 2)
        words[:, :, 0] = low
        words[:, :, 1] = (words[:, :, 1] & 0xFE) | (high & 1)
    else:
        data[:, 2 : 2 + per_block] = low
        if kind != Type.IQ3_XXS:
            bits = 2 if kind == Type.IQ2_S else 1
            parts = (high % (1 << bits)).reshape(-1, 8, 8 // bits)
            data[:, 66:74] = (parts << (bits * np.arange(8 // bits))).sum(axis=2)


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
