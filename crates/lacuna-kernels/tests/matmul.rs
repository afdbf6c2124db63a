//! Products of every storage type, level and shape against f64.

mod support;

use half::bf16;
use lacuna_kernels::{Activation, Activations, Cpu, DType, Level, MatmulPrecision, Matrix};
use support::{Random, Storage, cpu, cpus, dequantize, levels, random_matrix};

/// `w * x` on `cpu`.
fn product(cpu: &Cpu, w: &Matrix<'_>, x: &[f32], tokens: usize) -> Vec<f32> {
    let needed = Activations::storage_bytes(tokens, w.cols()).unwrap_or(0);
    let mut storage = Storage::new(needed);
    let mut out = vec![f32::NAN; tokens * w.rows()];
    let x = cpu.activations(x, tokens, w.cols(), storage.bytes());
    cpu.matmul(&mut out, &x, w);
    out
}

/// The exact product and the documented bound of the error.
fn exact(dtype: DType, w: &[f64], x: &[f32]) -> (f64, f64) {
    let mut dot = 0.0;
    let mut bound = 0.0;
    for (w, x) in w.chunks(32).zip(x.chunks(32)) {
        let largest = x.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
        for (w, x) in w.iter().zip(x) {
            let (w, x) = (*w, f64::from(*x));
            dot += w * x;
            if dtype.is_quantized() {
                bound += w.abs() * f64::from(largest) / 254.0 * 1.0001;
            }
            // f32 accumulation. Minima are accumulated apart from what they cancel with.
            bound += 4.0 * (w.abs() + 1e-3) * x.abs() * f64::from(f32::EPSILON);
        }
    }
    let magnitude: f64 = w
        .iter()
        .zip(x)
        .map(|(w, x)| (w * f64::from(*x)).abs())
        .sum();
    (dot, bound + magnitude * 3e-6 + 1e-6)
}

fn check(dtype: DType, rows: usize, cols: usize, tokens: usize) {
    let bytes = random_matrix(dtype, rows, cols, 1.0, (rows * cols + tokens) as u64);
    let w = Matrix::new(dtype, rows, cols, &bytes).expect("a valid shape");
    let weights = dequantize(dtype, &bytes);
    let x = Random::new(7).units(tokens * cols);
    let expected = |weights: &[f64], x: &[f32]| -> Vec<(f64, f64)> {
        let each = (0..tokens * rows).map(|i| {
            let (t, r) = (i / rows, i % rows);
            exact(dtype, &weights[r * cols..][..cols], &x[t * cols..][..cols])
        });
        each.collect()
    };
    let precise = expected(&weights, &x);
    // Quantized ones are the same.
    let rounded = match dtype.is_quantized() {
        true => precise.clone(),
        false => {
            let weights = weights.iter().map(|w| bf16::from_f32(*w as f32).to_f64());
            let x = x.iter().map(|x| bf16::from_f32(*x).to_f32());
            expected(&weights.collect::<Vec<_>>(), &x.collect::<Vec<_>>())
        }
    };
    for cpu in cpus(2) {
        let (level, precision) = (cpu.level(), cpu.precision());
        let expected = match precision {
            MatmulPrecision::F32 => &precise,
            MatmulPrecision::Bf16 => &rounded,
        };
        let out = product(&cpu, &w, &x, tokens);
        for (i, (out, (expected, bound))) in out.iter().zip(expected).enumerate() {
            let error = (f64::from(*out) - expected).abs();
            assert!(
                error <= *bound,
                "{dtype} {level:?} {precision:?} {rows}x{cols}, token {}, row {}: {out} for {expected}, \
                 error {error:e} over {bound:e}",
                i / rows,
                i % rows
            );
        }
    }
}

#[test]
fn every_type_and_level_matches_f64() {
    for dtype in DType::ALL {
        let block = dtype.block_len().max(32);
        for (rows, cols) in [
            (1, block),
            (16, 2 * block),
            (37, 3 * block),
            (96, 4 * block),
        ] {
            for tokens in [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 16, 17, 33, 65, 71] {
                check(dtype, rows, cols, tokens);
            }
        }
    }
}

#[test]
fn rows_longer_than_a_panel_match_f64() {
    for dtype in DType::ALL {
        check(dtype, 33, 3072, 1);
        check(dtype, 33, 2304, 7);
        check(dtype, 33, 4864, 1);
        check(dtype, 33, 3328, 67);
        // More columns than are kept for the second tile of tokens.
        check(dtype, 17, 24_832, 9);
    }
}

#[test]
fn more_rows_than_panels_and_fewer_than_lanes_match_f64() {
    for dtype in DType::ALL {
        check(dtype, 700, 256, 13);
        check(dtype, 700, 256, 68);
        check(dtype, 700, 256, 1);
        for tokens in [1, 2, 3, 8, 13, 35] {
            check(dtype, 5, 512, tokens);
        }
    }
}

#[test]
fn float_rows_of_any_width_match_f64() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for cols in [1, 5, 16, 20, 31, 64, 100, 192] {
            for tokens in [1, 2, 3, 4, 8, 21] {
                check(dtype, 7, cols, tokens);
                check(dtype, 9, cols, tokens);
            }
        }
    }
}

#[test]
fn float_rows_around_a_block_and_tokens_around_a_group_match_f64() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for cols in [511, 512, 513, 520, 1027, 1541] {
            for (rows, tokens) in [
                (1, 1),
                (3, 2),
                (5, 3),
                (6, 4),
                (66, 7),
                (131, 17),
                (67, 50),
                (37, 97),
            ] {
                check(dtype, rows, cols, tokens);
            }
        }
    }
}

#[test]
fn float_rows_of_whole_blocks_match_f64() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for (rows, cols, tokens) in [
            (1, 32, 1),
            (15, 256, 16),
            (17, 288, 31),
            (129, 1056, 33),
            (300, 64, 300),
            (20, 6208, 49),
        ] {
            check(dtype, rows, cols, tokens);
        }
    }
}

#[test]
fn a_float_row_is_the_same_however_many_tokens_and_rows_are_beside_it() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for (rows, cols, tokens) in [
            (71, 1541, 100),
            (130, 519, 49),
            (1, 7, 60),
            (33, 520, 197),
            // More tokens than a task has.
            (20, 37, 533),
            // Whole blocks: fewer columns than are rounded at once, and more.
            (140, 96, 281),
            (37, 3136, 70),
            // The same of few tokens, up to a tile of sixteen and two of them.
            (53, 3136, 3),
            (21, 3136, 16),
            (36, 128, 29),
            // As many as are few with few registers, and one more.
            (19, 700, 22),
            (19, 700, 23),
        ] {
            let bytes = random_matrix(dtype, rows, cols, 1.0, 31);
            let x = Random::new(8).units(tokens * cols);
            let row_bytes = bytes.len() / rows;
            for cpu in cpus(2) {
                let (level, precision) = (cpu.level(), cpu.precision());
                let all = Matrix::new(dtype, rows, cols, &bytes).expect("a valid shape");
                let batch = product(&cpu, &all, &x, tokens);
                for row in [0, rows / 2, rows - 1] {
                    let bytes = &bytes[row * row_bytes..][..row_bytes];
                    let alone = Matrix::new(dtype, 1, cols, bytes).expect("a valid shape");
                    for token in [0, tokens / 2, tokens - 1] {
                        let dot = product(&cpu, &alone, &x[token * cols..][..cols], 1)[0];
                        let same = dot.to_bits() == batch[token * rows + row].to_bits();
                        assert!(
                            same,
                            "{dtype} {level:?} {precision:?} {rows}x{cols} row {row}, token {token}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_matrix_without_columns_multiplies_to_zero() {
    let w = Matrix::new(DType::F16, 3, 0, &[]).expect("a valid shape");
    for tokens in [1, 5, 40] {
        assert_eq!(
            product(&cpu(Level::best(), 1), &w, &[], tokens),
            vec![0.0; 3 * tokens]
        );
    }
}

#[test]
fn dequantized_rows_are_the_definition() {
    for dtype in DType::ALL {
        let (rows, cols) = (3, 2 * dtype.block_len().max(32));
        let bytes = random_matrix(dtype, rows, cols, 1.0, 3);
        let w = Matrix::new(dtype, rows, cols, &bytes).expect("a valid shape");
        let expected = dequantize(dtype, &bytes);
        for row in 0..rows {
            let mut out = vec![0.0; cols];
            w.dequantize_row(row, &mut out);
            for (out, expected) in out.iter().zip(&expected[row * cols..]) {
                assert_eq!(*out, *expected as f32, "{dtype}");
            }
        }
    }
}

#[test]
fn a_token_does_not_depend_on_its_batch_or_on_threads() {
    for dtype in DType::ALL {
        let (rows, cols, tokens) = (83, 1280, 69);
        let bytes = random_matrix(dtype, rows, cols, 1.0, 11);
        let w = Matrix::new(dtype, rows, cols, &bytes).expect("a valid shape");
        let x = Random::new(5).units(tokens * cols);
        for level in levels() {
            let single = cpu(level, 1);
            let expected: Vec<f32> = x
                .chunks(cols)
                .flat_map(|x| product(&single, &w, x, 1))
                .collect();
            for threads in [1, 2, 3] {
                let cpu = cpu(level, threads);
                for batch in [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 33, 69] {
                    let out = product(&cpu, &w, &x[..batch * cols], batch);
                    let same = out
                        .iter()
                        .zip(&expected)
                        .all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{dtype} {level:?} {threads} threads, batch {batch}");
                }
            }
        }
    }
}

#[test]
fn one_token_of_long_rows_is_the_same_alone_and_in_a_batch() {
    for dtype in DType::ALL {
        let (rows, cols, tokens) = (21, 4864, 9);
        let bytes = random_matrix(dtype, rows, cols, 1.0, 13);
        let w = Matrix::new(dtype, rows, cols, &bytes).expect("a valid shape");
        let x = Random::new(6).units(tokens * cols);
        for level in levels() {
            let cpu = cpu(level, 2);
            let alone = product(&cpu, &w, &x[..cols], 1);
            for batch in [2, 8, 9] {
                let out = product(&cpu, &w, &x[..batch * cols], batch);
                assert_eq!(out[..rows], alone, "{dtype} {level:?} batch {batch}");
            }
        }
    }
}

#[test]
fn quantized_products_are_the_same_on_all_levels() {
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_quantized()) {
        // Blocks of columns that do not come in fours, where the type has such.
        let block = dtype.block_len();
        for (rows, cols, tokens) in [(35, 1280, 7), (19, 9 * block, 35)] {
            let bytes = random_matrix(dtype, rows, cols, 1.0, 17);
            let w = Matrix::new(dtype, rows, cols, &bytes).expect("a valid shape");
            let x = Random::new(23).units(tokens * cols);
            let mut results = levels()
                .into_iter()
                .map(|level| product(&cpu(level, 2), &w, &x, tokens));
            let first = results.next().expect("a level");
            assert!(
                results.all(|other| other == first),
                "{dtype}, {tokens} tokens"
            );
        }
    }
}

#[test]
fn rows_that_are_read_as_streams_have_the_products_of_rows_that_are_packed() {
    // A task has several times as many rows as streams and lanes, and some that are left over.
    let (rows, cols, many) = (701, 1024, 40);
    for dtype in [DType::Q8_0, DType::Q4K, DType::Q6K, DType::Iq3S] {
        let bytes = random_matrix(dtype, rows, cols, 1.0, 41);
        let w = Matrix::new(dtype, rows, cols, &bytes).expect("a valid shape");
        let x = Random::new(43).units(many * cols);
        for level in levels() {
            let cpu = cpu(level, 1);
            let packed = product(&cpu, &w, &x, many);
            for tokens in [1, 2, 3, 5, 8, 16] {
                assert_eq!(
                    product(&cpu, &w, &x[..tokens * cols], tokens),
                    packed[..tokens * rows],
                    "{level:?}, {dtype}, {tokens} tokens"
                );
            }
        }
    }
}

#[test]
fn a_matrix_may_lie_at_any_alignment() {
    for dtype in DType::ALL {
        let (rows, cols) = (17, 256);
        let bytes = random_matrix(dtype, rows, cols, 1.0, 29);
        let mut shifted = vec![0; bytes.len() + 1];
        shifted[1..].copy_from_slice(&bytes);
        let x = Random::new(2).units(cols);
        let cpu = cpu(Level::best(), 1);
        let aligned = Matrix::new(dtype, rows, cols, &bytes).expect("a valid shape");
        let unaligned = Matrix::new(dtype, rows, cols, &shifted[1..]).expect("a valid shape");
        assert_eq!(
            product(&cpu, &aligned, &x, 1),
            product(&cpu, &unaligned, &x, 1)
        );
    }
}

#[test]
fn products_of_one_input_are_the_same_together_and_apart() {
    for cols in [256, 2304] {
        let x = Random::new(31).units(300 * cols);
        for dtypes in [
            [DType::Q8_0, DType::Q8_0, DType::Q8_0],
            [DType::Q4K, DType::Q6K, DType::Q4_0],
            [DType::F16, DType::Q5K, DType::F32],
            [DType::Iq2Xxs, DType::Iq3S, DType::Iq4Xs],
            [DType::Q2K, DType::Mxfp4, DType::Iq2S],
            [DType::Tq1_0, DType::Q3K, DType::Bf16],
        ] {
            let rows = [700, 5, 131];
            let bytes: [Vec<u8>; 3] = std::array::from_fn(|i| {
                random_matrix(dtypes[i], rows[i], cols, 1.0, (i + cols) as u64)
            });
            let w: [Matrix<'_>; 3] = std::array::from_fn(|i| {
                Matrix::new(dtypes[i], rows[i], cols, &bytes[i]).expect("a valid shape")
            });
            for (threads, tokens) in [
                (1, 1),
                (2, 1),
                (3, 1),
                (2, 3),
                (3, 33),
                (2, 66),
                // More than a task of floats alone has.
                (2, 300),
            ] {
                for cpu in cpus(threads) {
                    let (level, precision) = (cpu.level(), cpu.precision());
                    let x = &x[..tokens * cols];
                    let apart = w.map(|w| product(&cpu, &w, x, tokens));
                    let mut together = rows.map(|rows| vec![f32::NAN; tokens * rows]);
                    let needed = Activations::storage_bytes(tokens, cols).expect("whole blocks");
                    let mut storage = Storage::new(needed);
                    let x = cpu.activations(x, tokens, cols, storage.bytes());
                    let outs = together.each_mut().map(Vec::as_mut_slice);
                    cpu.matmul_each(outs, &x, w.each_ref());
                    assert!(
                        together == apart,
                        "{dtypes:?} {level:?} {precision:?} {threads} {tokens}"
                    );
                }
            }
        }
    }
}

#[test]
fn what_follows_a_product_is_the_same_with_it_and_after_it() {
    let cols = 544;
    let rows = [67, 130];
    for dtype in [DType::F32, DType::F16, DType::Q8_0] {
        let bytes = rows.map(|rows| random_matrix(dtype, rows, cols, 0.1, rows as u64));
        let w: [Matrix<'_>; 2] = std::array::from_fn(|i| {
            Matrix::new(dtype, rows[i], cols, &bytes[i]).expect("a valid shape")
        });
        let bias = Random::new(32).units(rows[1]);
        for level in levels() {
            for (threads, tokens) in [(1, 1), (2, 3), (3, 16), (2, 100), (3, 205)] {
                let cpu = cpu(level, threads);
                let x = Random::new(33).units(tokens * cols);
                let mut apart = w.map(|w| product(&cpu, &w, &x, tokens));
                cpu.add_bias(&mut apart[1], &bias);
                for out in &mut apart {
                    cpu.activate(Activation::GeluErf, out);
                }
                let mut together = rows.map(|rows| vec![f32::NAN; tokens * rows]);
                let needed = Activations::storage_bytes(tokens, cols).expect("whole blocks");
                let mut storage = Storage::new(needed);
                let x = cpu.activations(&x, tokens, cols, storage.bytes());
                let outs = together.each_mut().map(Vec::as_mut_slice);
                let linears = [(&w[0], None), (&w[1], Some(&*bias))];
                cpu.linear_each(outs, &x, linears, Some(Activation::GeluErf));
                assert_eq!(together, apart, "{dtype} {level:?} {threads} {tokens}");
            }
        }
    }
}

#[test]
fn activations_of_another_level_are_refused() {
    let all = levels();
    let w = vec![0; DType::Q4_0.row_bytes(64).expect("whole blocks") * 16];
    let w = Matrix::new(DType::Q4_0, 16, 64, &w).expect("a valid shape");
    for (made, used) in all.iter().zip(all.iter().skip(1)) {
        let (made, used) = (cpu(*made, 1), cpu(*used, 1));
        let needed = Activations::storage_bytes(2, 64).expect("whole blocks");
        let mut storage = Storage::new(needed);
        let x = made.activations(&[1.0; 128], 2, 64, storage.bytes());
        let mut out = [0.0; 32];
        let product = std::panic::AssertUnwindSafe(|| used.matmul(&mut out, &x, &w));
        assert!(std::panic::catch_unwind(product).is_err());
    }
}
