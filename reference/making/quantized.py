"""Weights, and the blocks that other programs quantize them to: `quantized/blocks.gguf`.

`gguf` quantizes the types that are rounded plainly, llama.cpp those whose scales are searched for.
"""

import ctypes

import gguf
import numpy
from gguf import GGMLQuantizationType as Type
from llama_cpp import _ggml

PLAIN = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0"]
SEARCHED = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
ROWS, COLUMNS = 12, 256


def weights():
    """Rows as trained models have them, with few and with many far out, and some off centre."""
    random = numpy.random.default_rng(17)
    rows = [random.standard_normal(COLUMNS) * 0.02 for _ in range(4)]
    rows += [random.standard_t(4, COLUMNS) * 0.01 for _ in range(4)]
    rows += [random.laplace(0.01, 0.02, COLUMNS), random.uniform(-0.05, 0.05, COLUMNS)]
    rows += [random.standard_normal(COLUMNS) * 0.02 * numpy.repeat(random.uniform(0.2, 4, 16), 16)]
    rows += [random.integers(-1, 2, COLUMNS) * 0.03125]
    return numpy.stack(rows).astype(numpy.float32)


def by_llama_cpp(values, kind):
    quantize = _ggml.libggml.ggml_quantize_chunk
    quantize.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3 + [ctypes.c_void_p]
    quantize.restype = ctypes.c_size_t
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = numpy.zeros((ROWS, COLUMNS // block * size), numpy.uint8)
    written = quantize(int(kind), values.ctypes.data, blocks.ctypes.data, 0, ROWS, COLUMNS, None)
    assert written == blocks.nbytes, kind
    return blocks


def make(out):
    folder = out / "quantized"
    folder.mkdir(exist_ok=True)
    values = weights()
    writer = gguf.GGUFWriter(folder / "blocks.gguf", "none")
    writer.add_tensor("values", values)
    for name in PLAIN:
        kind = Type[name]
        writer.add_tensor(name.lower(), gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name in SEARCHED:
        kind = Type[name]
        writer.add_tensor(name.lower(), by_llama_cpp(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
