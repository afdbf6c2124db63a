//! GPTQ: whole numbers packed down the columns, a scale and a zero point for each group of inputs.
//!
//! ```text
//! X.qweight [columns x bits / 32, rows] i32    the first column of a word in its lowest bits
//! X.qzeros  [groups, rows x bits / 32] i32     less 1, unless the format is `gptq_v2`
//! X.scales  [groups, rows]                     weight = scale * (number - zero point)
//! X.g_idx   [columns] i32                      the group of each column; any, where `desc_act` is true
//! ```
//!
//! 4 bits become `Q4_0` where `sym` is true and all zero points are 8, and else `Q5_0`; 8 bits `Q8_0`. Where
//! columns are in any order, neighbours have different scales, and weights are rounded to `Q8_0`.

use lacuna_kernels::DType;
use serde_json::{Map, Value};

use super::blocks::{Grouped, Levels, Order, Target, Zero};
use super::part::Words;
use super::{FormError, Made, Table};

pub(super) fn read(settings: &Map<String, Value>, table: &mut Table<'_>) -> Result<(), FormError> {
    let formats = ["gptq", "gptq_v2"];
    super::expect(settings, "checkpoint_format", &formats, "gptq or gptq_v2")?;
    super::expect(settings, "pack_dtype", &["int32"], "int32")?;
    super::expect(settings, "is_marlin_format", &["false"], "false")?;
    let flag = |name| settings.get(name).and_then(Value::as_bool).unwrap_or(false);
    let variant = Variant {
        less_one: super::text(settings, "checkpoint_format").as_deref() != Some("gptq_v2"),
        symmetric: flag("sym"),
        in_order: !flag("desc_act"),
        group: super::said_group(settings),
    };
    for (module, name) in table.ending(".qweight") {
        let made = matrix(module, name, variant, table)?;
        table.put(name, made)?;
    }
    Ok(())
}

/// What the settings say of all matrices.
#[derive(Clone, Copy)]
struct Variant {
    /// Zero points are stored less 1.
    less_one: bool,
    /// All zero points are in the middle.
    symmetric: bool,
    /// Groups are columns one after another.
    in_order: bool,
    /// Columns of a group.
    group: Option<usize>,
}

fn matrix(
    module: &str,
    name: &str,
    variant: Variant,
    table: &mut Table<'_>,
) -> Result<Made, FormError> {
    let mut part = |suffix: &str| table.require(&format!("{module}.{suffix}"), name);
    let (levels, zeros) = (part("qweight")?.words()?, part("qzeros")?.words()?);
    let scales = part("scales")?;
    let ([words, rows], [groups, of_rows]) = (levels.0.matrix()?, scales.matrix()?);
    let [zero_groups, zero_words] = zeros.0.matrix()?;
    let bits = match [4, 8].into_iter().find(|bits| {
        zero_words
            .checked_mul(32)
            .is_some_and(|all| Some(all) == rows.checked_mul(*bits))
    }) {
        Some(bits) if of_rows == rows && zero_groups == groups => bits,
        _ => {
            let [four, eight] = [rows / 8, rows / 4];
            let expected = format!("[{groups}, {four}] for 4 bits or [{groups}, {eight}] for 8");
            return Err(zeros.0.misshapen(expected));
        }
    };
    let columns = words.saturating_mul(32 / bits);
    let group = super::group_of(columns, groups, variant.group, &scales)?;
    // In one group, any order is the same.
    let in_order = variant.in_order || groups == 1;
    let order_name = format!("{module}.g_idx");
    let order = match in_order {
        true => table.take(&order_name),
        false => Some(table.require(&order_name, name)?),
    };
    let order = match order {
        None => Order::Consecutive(None),
        Some(order) => {
            let order = order.shaped(&[columns])?.words()?;
            match in_order {
                true => Order::Consecutive(Some(order)),
                false => Order::Listed(order),
            }
        }
    };
    let exact = match (&order, bits, variant.symmetric) {
        (Order::Listed(_), ..) => None,
        (_, 4, true) => Some(DType::Q4_0),
        (_, 4, false) => Some(DType::Q5_0),
        (_, _, true) => Some(DType::Q8_0),
        (_, _, false) => None,
    };
    let target = Target::of(exact, columns, group);
    let zeros_name = zeros.0.name().to_owned();
    let grouped = Grouped {
        levels: Packed {
            levels,
            zeros,
            rows,
            bits,
            more: i32::from(variant.less_one),
        },
        scales: scales.floats()?,
        columns,
        group,
        order,
        target,
        zeros: zeros_name,
    };
    Ok(grouped.made(
        format!("{module}.weight"),
        vec![rows, columns],
        ["gptq", "gptq, rounded"],
    ))
}

#[derive(Debug)]
struct Packed {
    levels: Words,
    zeros: Words,
    rows: usize,
    bits: usize,
    /// Added to zero points.
    more: i32,
}

impl Levels for Packed {
    fn row(&self, row: usize, levels: &mut [u8]) {
        let words = self.levels.every(row, self.rows);
        for (word, levels) in words.zip(levels.chunks_exact_mut(32 / self.bits)) {
            for (index, level) in levels.iter_mut().enumerate() {
                *level = (word >> (self.bits * index)) as u8 & mask(self.bits);
            }
        }
    }

    fn zero(&self, row: usize, group: usize) -> Zero {
        let each = 32 / self.bits;
        let word = self.zeros.get(group * (self.rows / each) + row / each);
        // All of the word is here still, and it may be the largest number.
        let zero = ((word >> (self.bits * (row % each))) as i32).wrapping_add(self.more);
        // One less than 0 was stored as the largest number.
        Zero::Level(zero & i32::from(mask(self.bits)))
    }

    fn scale(&self, row: usize, group: usize) -> usize {
        group * self.rows + row
    }
}

/// The lowest so many bits of a byte.
pub(super) fn mask(bits: usize) -> u8 {
    u8::MAX >> (8 - bits)
}
