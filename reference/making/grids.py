"""Prints `crates/lacuna-kernels/src/quantized/grids/tables.rs` from the tables of `gguf`: needs `gguf` and `numpy` only.

    python -m making.grids | rustfmt --edition 2024 > ../crates/lacuna-kernels/src/quantized/grids/tables.rs
"""

import numpy as np
from gguf import quants

HEAD = """//! The points that IQ2 and IQ3 types choose from, as codes: of eight elements of two bits each, or of
//! four elements of four bits, the first one lowest. Made by `reference/making/grids.py`.
//!
//! The points are those of `ggml-common.h`: Copyright (c) 2023-2026 The ggml authors, MIT licence:
//!
//! Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
//! associated documentation files (the "Software"), to deal in the Software without restriction,
//! including without limitation the rights to use, copy, modify, merge, publish, distribute,
//! sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
//! furnished to do so, subject to the following conditions: The above copyright notice and this
//! permission notice shall be included in all copies or substantial portions of the Software. The
//! Software is provided "as is", without warranty of any kind, express or implied, including but not
//! limited to the warranties of merchantability, fitness for a particular purpose and
//! noninfringement. In no event shall the authors or copyright holders be liable for any claim,
//! damages or other liability, whether in an action of contract, tort or otherwise, arising from, out
//! of or in connection with the Software or the use or other dealings in the Software.
"""


def codes(kind: type) -> np.ndarray:
    kind.init_grid()
    points = kind.grid.reshape(kind.grid_shape)
    elements = np.searchsorted(np.array(kind.grid_map), points)
    bits = 16 // kind.grid_shape[1]
    return (elements << (bits * np.arange(kind.grid_shape[1]))).sum(axis=1)


def main() -> None:
    print(HEAD)
    for kind in (quants.IQ2_XXS, quants.IQ2_XS, quants.IQ2_S, quants.IQ3_XXS, quants.IQ3_S):
        values = codes(kind)
        print(f"pub(super) const {kind.__name__}: [u16; {len(values)}] = [")
        print(", ".join(f"0x{value:04x}" for value in values), "];\n")


if __name__ == "__main__":
    main()
