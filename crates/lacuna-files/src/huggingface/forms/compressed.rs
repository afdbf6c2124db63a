//! compressed-tensors: whole numbers, packed or not, or FP8.
//!
//! ```text
//! pack-quantized: X.weight_packed [rows, columns x bits / 32] i32   the first of a word in its lowest bits
//!                 X.weight_shape [2] i64                            rows and columns
//! int-quantized:  X.weight [rows, columns] i8
//! both:           X.weight_scale [rows, groups], [rows, 1] or [1]
//!                 X.weight_zero_point [rows x bits / 32, groups] i32, or i8 as the scales
//!                 X.weight_g_idx [columns] i32                      the group of each column
//! float-quantized: as FP8
//! ```
//!
//! Packed numbers are 8 (of 8 bits: 128) more than they are worth, and so are packed zero points. 4 bits
//! become `Q4_0`, with zero points `Q5_0`; 8 bits `Q8_0`, with zero points rounded.

use lacuna_kernels::DType;
use serde_json::{Map, Value};

use super::blocks::{Grouped, Levels, Order, Target, Zero};
use super::gptq::mask;
use super::part::{Part, Words};
use super::{FormError, Made, Table, fp8};

/// Formats that are read.
const FORMATS: &[&str] = &[
    "dense",
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    // Each group of layers says its own.
    "mixed-precision",
];
const EXPECTED: &str = "pack-quantized, int-quantized or float-quantized";

pub(super) fn read(settings: &Map<String, Value>, table: &mut Table<'_>) -> Result<(), FormError> {
    super::expect(settings, "format", FORMATS, EXPECTED)?;
    let object = |name: &str| settings.get(name).and_then(Value::as_object);
    if let Some(sparsity) = object("sparsity_config") {
        super::expect(sparsity, "format", &["dense"], "dense")?;
    }
    // Weights that are multiplied with a transform of their inputs would be wrong without it.
    let transforms = object("transform_config").and_then(|config| config.get("config_groups"));
    if transforms.is_some_and(|groups| groups.as_object().is_none_or(|groups| !groups.is_empty())) {
        return Err(super::unsupported(
            settings,
            "transform_config",
            "no transform",
        ));
    }
    let (mut block, mut symmetric) = (None, Vec::new());
    for group in object("config_groups").into_iter().flat_map(Map::values) {
        let Some(group) = group.as_object() else {
            continue;
        };
        super::expect(group, "format", FORMATS, EXPECTED)?;
        let Some(weights) = group.get("weights").and_then(Value::as_object) else {
            continue;
        };
        super::expect(weights, "num_bits", &["4", "8"], "4 or 8")?;
        super::expect(weights, "type", &["int", "float"], "int or float")?;
        let size = weights.get("block_structure").and_then(fp8::size);
        block = block.or(size);
        symmetric.push(weights.get("symmetric").and_then(Value::as_bool) != Some(false));
    }
    let presence = match (symmetric.contains(&true), symmetric.contains(&false)) {
        (true, false) => Presence::Idle,
        (false, true) => Presence::Required,
        _ => Presence::Optional,
    };
    for (module, name) in table.ending(".weight_packed") {
        let made = packed(module, name, presence, table)?;
        table.put(name, made)?;
    }
    for (module, name) in table.ending(".weight") {
        let weights = table.tensors.find(name).map(Part::new);
        if weights.is_some_and(|weights| weights.type_name() == "i8") {
            let made = bytes(module, name, presence, table)?;
            table.put(name, made)?;
        }
    }
    // The size of blocks is not always said.
    fp8::read_all(block.unwrap_or([128, 128]), table)
}

/// Whether matrices have zero points.
#[derive(Clone, Copy)]
enum Presence {
    /// All are symmetric; zero points are 0 where there are some.
    Idle,
    /// Some are.
    Optional,
    /// None are.
    Required,
}

impl Presence {
    fn take(
        self,
        module: &str,
        name: &str,
        table: &mut Table<'_>,
    ) -> Result<Option<Part>, FormError> {
        let zeros = format!("{module}.weight_zero_point");
        match self {
            Self::Idle => {
                table.take(&zeros);
                Ok(None)
            }
            Self::Optional => Ok(table.take(&zeros)),
            Self::Required => table.require(&zeros, name).map(Some),
        }
    }
}

fn packed(
    module: &str,
    name: &str,
    presence: Presence,
    table: &mut Table<'_>,
) -> Result<Made, FormError> {
    let levels = table.require(name, name)?.words()?;
    let shape = table.require(&format!("{module}.weight_shape"), name)?;
    let [rows, words] = levels.0.matrix()?;
    let columns = columns(&shape, rows)?;
    let per_word = [8usize, 4];
    let bits = per_word.map(|each| (columns.div_ceil(each) == words).then_some(32 / each));
    let Some(bits) = bits.into_iter().flatten().next() else {
        let [four, eight] = per_word.map(|each| columns.div_ceil(each));
        let expected = format!("[{rows}, {four}] for 4 bits or [{rows}, {eight}] for 8");
        return Err(levels.0.misshapen(expected));
    };
    let zeros = presence.take(module, name, table)?;
    let numbers = Numbers::Packed {
        levels,
        words,
        bits,
    };
    made(module, name, [rows, columns], numbers, zeros, table)
}

/// What a tensor says the columns of a matrix of `rows` rows are.
fn columns(shape: &Part, rows: usize) -> Result<usize, FormError> {
    let shape = shape.clone().shaped(&[2])?;
    let shape = shape.typed(&["i64", "i32"], "i64 or i32")?;
    let size = if shape.type_name() == "i64" { 8 } else { 4 };
    let mut sizes = shape.bytes().chunks_exact(size).map(|size| {
        let mut wide = [0; 8];
        wide[..size.len()].copy_from_slice(size);
        // Large, where it is negative.
        usize::try_from(u64::from_le_bytes(wide)).unwrap_or(usize::MAX)
    });
    let said = (sizes.next(), sizes.next());
    match said {
        // Rows of more would be larger than any memory.
        (Some(said), Some(columns)) if said == rows && columns < 1 << 40 => Ok(columns),
        _ => Err(shape.misshapen(format!("contents that say {rows} rows"))),
    }
}

fn bytes(
    module: &str,
    name: &str,
    presence: Presence,
    table: &mut Table<'_>,
) -> Result<Made, FormError> {
    let levels = table.require(name, name)?;
    let shape = levels.matrix()?;
    let zeros = presence.take(module, name, table)?;
    made(module, name, shape, Numbers::Bytes(levels), zeros, table)
}

fn made(
    module: &str,
    name: &str,
    [rows, columns]: [usize; 2],
    numbers: Numbers,
    zeros: Option<Part>,
    table: &mut Table<'_>,
) -> Result<Made, FormError> {
    let scales = table.require(&format!("{module}.weight_scale"), name)?;
    let order = table.take(&format!("{module}.weight_g_idx"));
    let scale_columns = match *scales.shape() {
        [] | [1] => 0,
        // None at all would be taken for one for all rows.
        [of_rows, groups] if of_rows == rows && groups > 0 => groups,
        _ => return Err(scales.misshapen(format!("[{rows}, groups]"))),
    };
    let group = super::group_of(columns, scale_columns.max(1), None, &scales)?;
    let bits = numbers.bits();
    let zeros = zeros.map(|zeros| Zeros::new(zeros, [rows, scale_columns], bits));
    let zeros = zeros.transpose()?;
    let order = order
        .map(|order| order.shaped(&[columns])?.words())
        .transpose()?;
    let exact = match (&order, bits, &zeros) {
        (Some(_), ..) => None,
        (None, 4, None) => Some(DType::Q4_0),
        (None, 4, Some(_)) => Some(DType::Q5_0),
        (None, _, None) => Some(DType::Q8_0),
        (None, _, Some(_)) => None,
    };
    let target = Target::of(exact, columns, group);
    let grouped = Grouped {
        levels: Stored {
            numbers,
            zeros,
            scale_columns,
        },
        scales: scales.floats()?,
        columns,
        group,
        order: order.map_or(Order::Consecutive(None), Order::Listed),
        target,
        zeros: format!("{module}.weight_zero_point"),
    };
    Ok(grouped.made(
        format!("{module}.weight"),
        vec![rows, columns],
        ["compressed-tensors", "compressed-tensors, rounded"],
    ))
}

#[derive(Debug)]
enum Numbers {
    Packed {
        levels: Words,
        /// Of a row.
        words: usize,
        bits: usize,
    },
    /// Signed.
    Bytes(Part),
}

impl Numbers {
    fn bits(&self) -> usize {
        match self {
            Self::Packed { bits, .. } => *bits,
            Self::Bytes(_) => 8,
        }
    }
}

#[derive(Debug)]
enum Zeros {
    /// Down the rows.
    Packed { zeros: Words, bits: usize },
    /// Signed.
    Bytes {
        zeros: Part,
        /// Of a row; 0 where there is one for all rows.
        columns: usize,
    },
}

impl Zeros {
    fn new(zeros: Part, [rows, groups]: [usize; 2], bits: usize) -> Result<Self, FormError> {
        let groups = groups.max(1);
        if zeros.type_name() == "i8" {
            // One for all rows, as with scales.
            return match zeros.shape().iter().product::<usize>() == 1 {
                true => Ok(Self::Bytes { zeros, columns: 0 }),
                // Rows may have their own, also where they have one scale together.
                false => Ok(Self::Bytes {
                    zeros: zeros.shaped(&[rows, groups])?,
                    columns: groups,
                }),
            };
        }
        let zeros = zeros.shaped(&[rows.div_ceil(32 / bits), groups])?.words()?;
        Ok(Self::Packed { zeros, bits })
    }
}

#[derive(Debug)]
struct Stored {
    numbers: Numbers,
    zeros: Option<Zeros>,
    /// Scales of a row; 0 where there is one for all rows.
    scale_columns: usize,
}

impl Levels for Stored {
    fn row(&self, row: usize, levels: &mut [u8]) {
        match &self.numbers {
            Numbers::Packed {
                levels: packed,
                words,
                bits,
            } => {
                let words = packed.every(row * words, 1);
                for (word, levels) in words.zip(levels.chunks_mut(32 / bits)) {
                    for (index, level) in levels.iter_mut().enumerate() {
                        *level = (word >> (bits * index)) as u8 & mask(*bits);
                    }
                }
            }
            Numbers::Bytes(bytes) => {
                let bytes = &bytes.bytes()[row * levels.len()..];
                for (level, byte) in levels.iter_mut().zip(bytes) {
                    *level = byte ^ 0x80;
                }
            }
        }
    }

    fn zero(&self, row: usize, group: usize) -> Zero {
        Zero::Level(match &self.zeros {
            None => 1 << (self.numbers.bits() - 1),
            Some(Zeros::Packed { zeros, bits }) => {
                let each = 32 / bits;
                let word = zeros.get(row / each * self.scale_columns.max(1) + group);
                (word >> (bits * (row % each))) as i32 & i32::from(mask(*bits))
            }
            Some(Zeros::Bytes { zeros, columns }) => {
                // The only one is that of every group, too.
                let at = if *columns == 0 {
                    0
                } else {
                    row * columns + group
                };
                i32::from(zeros.bytes()[at] ^ 0x80)
            }
        })
    }

    fn scale(&self, row: usize, group: usize) -> usize {
        row * self.scale_columns + group
    }
}
