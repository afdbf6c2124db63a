//! AWQ: whole numbers of 4 bits packed along the rows in an order of their own.
//!
//! ```text
//! X.qweight [columns, rows / 8] i32    of eight rows 0, 2, 4, 6, 1, 3, 5, 7, the first in the lowest bits
//! X.qzeros  [groups, rows / 8] i32     in the same order
//! X.scales  [groups, rows]             weight = scale * (number - zero point)
//! ```
//!
//! They become `Q5_0`, which holds the differences.

use lacuna_kernels::DType;
use serde_json::{Map, Value};

use super::blocks::{Grouped, Levels, Order, Target, Zero};
use super::part::Words;
use super::{FormError, Made, Table};

/// Which four bits of a word each of eight rows is in.
const PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

pub(super) fn read(settings: &Map<String, Value>, table: &mut Table<'_>) -> Result<(), FormError> {
    super::expect(settings, "version", &["gemm"], "gemm")?;
    super::expect(settings, "bits", &["4"], "4")?;
    super::expect(settings, "zero_point", &["true"], "true")?;
    let group = super::said_group(settings);
    for (module, name) in table.ending(".qweight") {
        let made = matrix(module, name, group, table)?;
        table.put(name, made)?;
    }
    Ok(())
}

fn matrix(
    module: &str,
    name: &str,
    group: Option<usize>,
    table: &mut Table<'_>,
) -> Result<Made, FormError> {
    let mut part = |suffix: &str| table.require(&format!("{module}.{suffix}"), name);
    let (levels, zeros) = (part("qweight")?.words()?, part("qzeros")?);
    let scales = part("scales")?;
    let ([columns, words], [groups, rows]) = (levels.0.matrix()?, scales.matrix()?);
    if words.checked_mul(8) != Some(rows) {
        return Err(scales.misshapen(format!("[groups, {}]", words.saturating_mul(8))));
    }
    let zeros = zeros.shaped(&[groups, words])?.words()?;
    let group = super::group_of(columns, groups, group, &scales)?;
    let target = Target::of(Some(DType::Q5_0), columns, group);
    let zeros_name = zeros.0.name().to_owned();
    let grouped = Grouped {
        levels: Packed {
            levels,
            zeros,
            rows,
        },
        scales: scales.floats()?,
        columns,
        group,
        order: Order::Consecutive(None),
        target,
        zeros: zeros_name,
    };
    Ok(grouped.made(
        format!("{module}.weight"),
        vec![rows, columns],
        ["awq", "awq, rounded"],
    ))
}

#[derive(Debug)]
struct Packed {
    levels: Words,
    zeros: Words,
    rows: usize,
}

impl Levels for Packed {
    fn row(&self, row: usize, levels: &mut [u8]) {
        let words = self.levels.every(row / 8, self.rows / 8);
        for (level, word) in levels.iter_mut().zip(words) {
            *level = (word >> (4 * PLACES[row % 8])) as u8 & 15;
        }
    }

    fn zero(&self, row: usize, group: usize) -> Zero {
        let word = self.zeros.get(group * (self.rows / 8) + row / 8);
        Zero::Level((word >> (4 * PLACES[row % 8])) as i32 & 15)
    }

    fn scale(&self, row: usize, group: usize) -> usize {
        group * self.rows + row
    }
}
