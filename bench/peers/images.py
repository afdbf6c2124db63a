#!/usr/bin/env python3
"""Encoders of images: Lacuna and llama.cpp, in turn, on the same file and threads.

    lacuna synth gemma3-4b --layers 1 --dtype q8_0 -o text.gguf
    lacuna synth gemma3-4b-mmproj --dtype q8_0 -o mmproj.gguf
    bench/peers/images.py mmproj.gguf --text text.gguf --threads 2 --rounds 3

Prints what a pass over one image takes in each, pixels in memory before it: medians, and Lacuna's over llama.cpp's. Where
the processor multiplies bf16, Lacuna takes turns with itself at `--matmul-precision bf16`. Needs llama-cpp-python, whose
library of images wants a model of language beside the encoder: --text, of which nothing is computed. llama.cpp runs with
and without flash attention, and the better counts.
"""

import argparse
import ctypes
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def lacuna(arguments, precision: str) -> float:
    """Milliseconds of a pass."""
    command = [
        arguments.lacuna, "bench", "images", arguments.mmproj, "--size", arguments.size, "--threads", str(arguments.threads),
        "--rounds", "3", "--matmul-precision", precision, "--json",
    ]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    arguments.said[precision] = f"{report['rows']} rows, {report['gmac_per_s']:.0f} GMAC/s, {report['of_limit']:.0%} of the limit"
    return report["ms"]


class LlamaCpp:
    def __init__(self, arguments, flash: bool):
        import llama_cpp
        from llama_cpp import mtmd_cpp

        self.library = mtmd_cpp
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(arguments.text.encode(), model)
        params = mtmd_cpp.mtmd_context_params_default()
        params.use_gpu, params.print_timings, params.n_threads, params.warmup = False, False, arguments.threads, False
        # 1 and 0 are `LLAMA_FLASH_ATTN_TYPE_ENABLED` and `_DISABLED`.
        params.flash_attn_type = int(flash)
        self.context = mtmd_cpp.mtmd_init_from_file(arguments.mmproj.encode(), self.model, params)
        if not self.context:
            sys.exit("llama.cpp does not open the encoder")
        width, height = (int(side) for side in arguments.size.split("x"))
        pixels = (ctypes.c_uint8 * (width * height * 3))(*(at * 31 % 251 for at in range(width * height * 3)))
        bitmap = mtmd_cpp.mtmd_bitmap_init(width, height, pixels)
        text = mtmd_cpp.mtmd_input_text()
        text.text = mtmd_cpp.mtmd_default_marker()
        text.text_len, text.add_special, text.parse_special = len(text.text), True, True
        self.chunks = mtmd_cpp.mtmd_input_chunks_init()
        bitmaps = (ctypes.c_void_p * 1)(bitmap)
        if mtmd_cpp.mtmd_tokenize(self.context, self.chunks, ctypes.byref(text), bitmaps, 1) != 0:
            sys.exit("llama.cpp does not take the image")

    def milliseconds(self) -> float:
        """Of all pieces that it makes of the image, one after the other."""
        library, taken = self.library, 0.0
        for index in range(library.mtmd_input_chunks_size(self.chunks)):
            chunk = library.mtmd_input_chunks_get(self.chunks, index)
            if library.mtmd_input_chunk_get_type(chunk) != library.MTMD_INPUT_CHUNK_TYPE_IMAGE:
                continue
            start = time.perf_counter()
            if library.mtmd_encode_chunk(self.context, chunk) != 0:
                sys.exit("llama.cpp does not encode the image")
            taken += time.perf_counter() - start
        return taken * 1e3


def has_bf16() -> bool:
    return "avx512_bf16" in pathlib.Path("/proc/cpuinfo").read_text(encoding="ascii")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mmproj")
    parser.add_argument("--text", required=True, help="a model of language of the encoder's width")
    parser.add_argument("--size", default="1024x768")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lacuna", default=str(ROOT / "target" / "release" / "lacuna"))
    arguments = parser.parse_args()
    arguments.said = {}
    engines = {"Lacuna": lambda: lacuna(arguments, "f32")}
    if has_bf16():
        engines["Lacuna, bf16"] = lambda: lacuna(arguments, "bf16")
    for flash, name in ((False, "llama.cpp"), (True, "llama.cpp, flash attention")):
        engines[name] = LlamaCpp(arguments, flash).milliseconds
    taken = {name: [] for name in engines}
    for turn in range(arguments.rounds + 1):
        for name, measure in engines.items():
            milliseconds = measure()
            # The first time weights come from their file.
            if turn > 0:
                taken[name].append(milliseconds)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    best = min(value for name, value in medians.items() if name.startswith("llama"))
    for name, value in medians.items():
        print(f"{name:28} {value:9.0f} ms  {min(taken[name]):.0f} to {max(taken[name]):.0f}  {best / value:.2f}x")
    for precision, said in arguments.said.items():
        print(f"Lacuna, {precision}: {said}")


if __name__ == "__main__":
    main()
