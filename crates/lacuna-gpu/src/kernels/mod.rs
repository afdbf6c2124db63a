#![expect(
    unsafe_code,
    reason = "kernels are code that the compiler does not see"
)]

//! The kernels: WGSL beside this file, and the SPIR-V that naga makes of it, committed. A test compiles it again and
//! compares.
//!
//! Those that read or write KV rows or states are compiled twice: with the files of `flat`, where a window shows them one
//! behind the other, and with those of `lookup`, where it shows entries of a table and they are in an array of heaps.
//!
//! # Safety
//!
//! * **K1** The SPIR-V is what naga made of the sources, each of which has one entry point of the name that is given
//!   here and uses what C1 of `lacuna_pages::vulkan` allows: up to four storage buffers of group 0, from binding 0 on,
//!   and constants of at most 128 bytes (the longest has 104). Those of `lookup` use the array of heaps, and are compiled where
//!   the device looks pages up alone. Products of packed bytes by one instruction are in those
//!   called dotted alone, which are compiled where the device has them.
//! * **K2** What a driver is given as made by it was written with a hash of all of it, beside the identity of device and
//!   driver, and both are compared before it is given. The folder is the user's own.

mod constants;
mod kept;
#[cfg(test)]
mod of_logits;
#[cfg(test)]
mod stored;
#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use of_logits::left_of;

use std::ffi::CStr;

use lacuna_kernels::DType;
use lacuna_pages::DeviceError;
use lacuna_pages::vulkan::{Compute, ComputeKernel};

pub(crate) use kept::KeptKernels;

pub(crate) use constants::{
    Attend, Bands, Columns, Combine, Constants, Convolve, Elementwise, Every, Hadamard, Heads,
    Likeliest, Magnitude, Merge, NONE, Norm, Prepare, Product, Quantize, Rotate, Route, Scan,
    Store, StoreBlocks, TopK,
};

/// Threads of a workgroup where each thread has elements of its own.
pub(crate) const THREADS: u32 = 128;
/// The most threads of a workgroup, those of `prepare` and of tiles.
pub(crate) const MOST_THREADS: u32 = 256;
/// The most bytes that threads of a workgroup share: those of tiles of quantized weights.
pub(crate) const MOST_SHARED_BYTES: u32 = 22_528;
/// Rows of a matrix that a workgroup has of a product with few tokens.
pub(crate) const PRODUCT_ROWS: u32 = 8;
/// Tokens that it has at most.
pub(crate) const PRODUCT_TOKENS: u32 = 8;
/// Rows and tokens of a workgroup of a product with many.
pub(crate) const TILE: u32 = 64;
/// The most tokens that are few: weights are read twice for them, by as many threads as there can be.
pub(crate) const FEW_TOKENS: usize = 16;
/// What kernels call a gate that is clamped, beside the activations.
pub(crate) const CLAMPED: u32 = 8;
/// The most experts that choices are made from.
pub(crate) const MOST_EXPERTS: usize = 1024;
/// Elements that a workgroup transforms, and the most of a block.
pub(crate) const HADAMARD_ELEMENTS: u32 = 512;
/// The most rows of a head's state.
pub(crate) const MOST_STATE_ROWS: usize = 256;
/// Rows of a partition of attention.
pub(crate) const PARTITION: usize = 64;
/// Query rows of a workgroup of attention of few tokens.
pub(crate) const ATTEND_ROWS: u32 = 4;
/// And of many.
pub(crate) const ATTEND_TILE: u32 = 64;
/// Elements of values that a thread of such a workgroup can keep sums of over several partitions.
pub(crate) const MERGED_ELEMENTS: usize = 128;
/// Workgroups that are enough to keep a device busy: where there are as many, each has all partitions of its query rows.
pub(crate) const ENOUGH_GROUPS: usize = 128;
/// The most query rows that are few: keys and values are read once for every four of them.
pub(crate) const FEW_QUERY_ROWS: usize = 16;
/// Logits of a row that a workgroup looks at for the largest: 32 to a thread, so that those of a usual vocabulary are some
/// dozens of workgroups.
pub(crate) const LIKELIEST_RUN: usize = 4096;
/// Logits of a row, or what is kept of them, that a workgroup sorts: eight kilobytes of keys and tokens.
pub(crate) const TOP_K_RUN: usize = 1024;
/// The most tokens that are kept of a row: no more than half of the shortest run of several, so that what is kept of a run
/// lies where it was.
pub(crate) const MOST_TOP_K: usize = TOP_K_RUN / 4;
/// Set in a word that tells of a row without a likeliest token.
pub(crate) const NO_TOKEN: u32 = 1 << 31;
/// What rows of keys and values are read by, where they are whole vectors of so many bytes.
pub(crate) const VECTOR_BYTES: usize = 16;

/// One module: what it is called, the name of its entry point, what it is compiled from, and what that gives.
struct Module {
    name: &'static str,
    entry: &'static CStr,
    #[cfg_attr(not(test), expect(dead_code, reason = "for the test that compares"))]
    sources: &'static [&'static str],
    code: &'static [u8],
    /// The same with products of packed bytes by one instruction.
    dotted: Option<&'static [u8]>,
}

macro_rules! module {
    ($name:expr, $entry:literal, [$($source:expr),+]) => {
        Module {
            name: $name,
            entry: $entry,
            sources: &[$(include_str!($source)),+],
            code: include_bytes!(concat!("spirv/", $name, ".spv")),
            dotted: None,
        }
    };
}

macro_rules! dotted {
    ($name:expr, $entry:literal, [$($source:expr),+]) => {
        Module {
            dotted: Some(include_bytes!(concat!("spirv/dotted/", $name, ".spv"))),
            ..module!($name, $entry, [$($source),+])
        }
    };
}

/// A kernel that reads or writes KV rows or states.
struct RowModules {
    /// For those that windows show one behind the other.
    flat: Module,
    /// For those that are looked up.
    lookup: Module,
}

impl RowModules {
    fn get(&self, looks_pages_up: bool) -> &Module {
        match looks_pages_up {
            true => &self.lookup,
            false => &self.flat,
        }
    }
}

/// `$file` of `flat` and of `lookup` says how rows or states are reached, and `$units` in what units pages are.
macro_rules! rows {
    ($module:ident, $name:literal, $entry:literal, [$file:literal $(, $units:literal)?], [$($source:literal),+]) => {
        RowModules {
            flat: $module!($name, $entry, [concat!("flat/", $file), $($source),+]),
            lookup: $module!(
                concat!("lookup/", $name),
                $entry,
                ["lookup/heaps.wgsl" $(, $units)?, concat!("lookup/", $file), $($source),+]
            ),
        }
    };
}

/// The kernels of a weight type: for few tokens, and for many.
struct ProductModules {
    few: Module,
    many: Module,
    /// The same for experts' matrices.
    few_of_experts: Module,
    many_of_experts: Module,
}

macro_rules! floats {
    ($name:literal, [$($weights:literal),+]) => {
        ProductModules {
            few: floats!(few concat!("product_", $name), "all.wgsl", [$($weights),+]),
            many: floats!(many concat!("tile_", $name), "all.wgsl", [$($weights),+]),
            few_of_experts: floats!(few concat!("expert_product_", $name), "experts.wgsl", [$($weights),+]),
            many_of_experts: floats!(many concat!("expert_tile_", $name), "experts.wgsl", [$($weights),+]),
        }
    };
    (few $name:expr, $rows:literal, [$($weights:literal),+]) => {
        module!(
            $name, c"product",
            ["matrix.wgsl", $rows, "product.wgsl", "weights/no_table.wgsl", "weights/floats.wgsl", $($weights),+]
        )
    };
    (many $name:expr, $rows:literal, [$($weights:literal),+]) => {
        module!(
            $name, c"tile",
            [
                "matrix.wgsl", $rows, "tile_floats.wgsl", "leave.wgsl", "weights/no_table.wgsl",
                "weights/floats.wgsl", $($weights),+
            ]
        )
    };
}

macro_rules! blocks {
    ($name:literal, [$($weights:literal),+]) => {
        ProductModules {
            few: blocks!(few concat!("product_", $name), "all.wgsl", [$($weights),+]),
            many: blocks!(many concat!("tile_", $name), "all.wgsl", [$($weights),+]),
            few_of_experts: blocks!(few concat!("expert_product_", $name), "experts.wgsl", [$($weights),+]),
            many_of_experts: blocks!(many concat!("expert_tile_", $name), "experts.wgsl", [$($weights),+]),
        }
    };
    (few $name:expr, $rows:literal, [$($weights:literal),+]) => {
        dotted!($name, c"product", ["matrix.wgsl", $rows, "product.wgsl", "weights/blocks.wgsl", $($weights),+])
    };
    (many $name:expr, $rows:literal, [$($weights:literal),+]) => {
        dotted!(
            $name, c"tile",
            ["matrix.wgsl", $rows, "tile.wgsl", "leave.wgsl", "weights/blocks.wgsl", $($weights),+]
        )
    };
}

const NORM: Module = module!("norm", c"norm", ["norm.wgsl", "together.wgsl"]);
const PREPARE: Module = module!(
    "prepare",
    c"prepare",
    ["prepare.wgsl", "together.wgsl", "unit.wgsl", "bytes.wgsl"]
);
const QUANTIZE: Module = module!(
    "quantize",
    c"quantize",
    [
        "quantize.wgsl",
        "unit.wgsl",
        "bytes.wgsl",
        "activations.wgsl",
        "gated.wgsl"
    ]
);
const HEADS: RowModules = rows!(
    module,
    "heads",
    c"heads",
    ["heads.wgsl", "lookup/by_words.wgsl"],
    ["heads.wgsl", "halves.wgsl"]
);
const ROTATE: Module = module!("rotate", c"rotate", ["rotate.wgsl"]);
const STORE: RowModules = rows!(
    module,
    "store",
    c"store",
    ["rows.wgsl", "lookup/by_words.wgsl"],
    ["store.wgsl", "halves.wgsl"]
);
const ATTEND: RowModules = rows!(
    module,
    "attend",
    c"attend",
    ["vectors.wgsl"],
    [
        "attention.wgsl",
        "rows.wgsl",
        "vectors.wgsl",
        "attend.wgsl",
        "attend_vectors.wgsl"
    ]
);
const ATTEND_MANY: RowModules = rows!(
    module,
    "attend_tile",
    c"attend_tile",
    ["vectors.wgsl"],
    [
        "attention.wgsl",
        "rows.wgsl",
        "vectors.wgsl",
        "attend_tile.wgsl"
    ]
);
const ATTEND_WORDS: RowModules = rows!(
    dotted,
    "attend_words",
    c"attend",
    ["words.wgsl", "lookup/by_words.wgsl"],
    [
        "attention.wgsl",
        "rows.wgsl",
        "attend.wgsl",
        "unit.wgsl",
        "attend_words.wgsl"
    ]
);
const STORE_BLOCKS: RowModules = rows!(
    module,
    "store_blocks",
    c"store_blocks",
    ["rows.wgsl", "lookup/by_words.wgsl"],
    ["store_blocks.wgsl", "unit.wgsl", "halves.wgsl"]
);
const HADAMARD: Module = module!("hadamard", c"hadamard", ["hadamard.wgsl"]);
const MERGE: Module = module!(
    "merge",
    c"merge",
    [
        "merge.wgsl",
        "merging.wgsl",
        "rows.wgsl",
        "unit.wgsl",
        "bytes.wgsl"
    ]
);
const ELEMENTWISE: Module = module!(
    "elementwise",
    c"elementwise",
    ["elementwise.wgsl", "activations.wgsl", "gated.wgsl"]
);
const COLUMNS: Module = module!("columns", c"columns", ["columns.wgsl"]);
const MAGNITUDE: Module = module!(
    "magnitude",
    c"magnitude",
    ["magnitude.wgsl", "together.wgsl"]
);
const LIKELIEST: Module = module!("likeliest", c"likeliest", ["likeliest.wgsl", "keys.wgsl"]);
const TOP_K: Module = module!("top_k", c"top_k", ["top_k.wgsl", "keys.wgsl"]);
const ROUTE: Module = module!("route", c"route", ["route.wgsl", "together.wgsl"]);
const BANDS: Module = module!("bands", c"bands", ["bands.wgsl"]);
const EVERY: Module = module!("every", c"every", ["every.wgsl"]);
const COMBINE: Module = module!("combine", c"combine", ["combine.wgsl"]);
const CONVOLVE: RowModules = rows!(
    module,
    "convolve",
    c"convolve",
    ["states.wgsl", "lookup/by_words.wgsl"],
    ["convolve.wgsl", "activations.wgsl"]
);
const SCAN: RowModules = rows!(
    module,
    "scan",
    c"scan",
    ["states.wgsl", "lookup/by_words.wgsl"],
    ["scan.wgsl"]
);

/// The products of each weight type that there are some for.
const PRODUCTS: [(DType, ProductModules); 14] = [
    (DType::F32, floats!("f32", ["weights/f32.wgsl"])),
    (
        DType::F16,
        floats!("f16", ["weights/halves.wgsl", "weights/f16.wgsl"]),
    ),
    (
        DType::Bf16,
        floats!("bf16", ["weights/halves.wgsl", "weights/bf16.wgsl"]),
    ),
    (
        DType::Q8_0,
        blocks!("q8_0", ["weights/no_table.wgsl", "weights/q8_0.wgsl"]),
    ),
    (
        DType::Q4_0,
        blocks!("q4_0", ["weights/no_table.wgsl", "weights/q4_0.wgsl"]),
    ),
    (
        DType::Q4_1,
        blocks!("q4_1", ["weights/no_table.wgsl", "weights/q4_1.wgsl"]),
    ),
    (
        DType::Q5_0,
        blocks!("q5_0", ["weights/no_table.wgsl", "weights/q5_0.wgsl"]),
    ),
    (
        DType::Q5_1,
        blocks!("q5_1", ["weights/no_table.wgsl", "weights/q5_1.wgsl"]),
    ),
    (
        DType::Q4K,
        blocks!("q4_k", ["weights/no_table.wgsl", "weights/q4_k.wgsl"]),
    ),
    (
        DType::Q5K,
        blocks!("q5_k", ["weights/no_table.wgsl", "weights/q5_k.wgsl"]),
    ),
    (
        DType::Q6K,
        blocks!("q6_k", ["weights/no_table.wgsl", "weights/q6_k.wgsl"]),
    ),
    (
        DType::Iq4Nl,
        blocks!("iq4_nl", ["weights/levels.wgsl", "weights/iq4_nl.wgsl"]),
    ),
    (
        DType::Iq4Xs,
        blocks!("iq4_xs", ["weights/levels.wgsl", "weights/iq4_xs.wgsl"]),
    ),
    (
        DType::Mxfp4,
        blocks!("mxfp4", ["weights/no_table.wgsl", "weights/mxfp4.wgsl"]),
    ),
];

/// The weight types that there is a product for.
pub(crate) fn products() -> impl Iterator<Item = DType> {
    PRODUCTS.iter().map(|(dtype, _)| *dtype)
}

/// What a model takes besides the kernels that all take.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    /// The types of its matrices.
    pub(crate) types: Vec<DType>,
    /// Those of experts' matrices.
    pub(crate) expert_types: Vec<DType>,
    /// Whether it has layers that keep states.
    pub(crate) states: bool,
    /// Whether KV rows are blocks of bytes.
    pub(crate) blocks: bool,
    /// Whether heads of KV rows are whole vectors.
    pub(crate) vectors: bool,
}

/// The kernels of one model, compiled for its device.
#[derive(Debug)]
pub(crate) struct Kernels {
    pub(crate) norm: ComputeKernel,
    pub(crate) prepare: ComputeKernel,
    pub(crate) heads: ComputeKernel,
    pub(crate) quantize: ComputeKernel,
    pub(crate) rotate: ComputeKernel,
    pub(crate) store: ComputeKernel,
    /// For few query rows, and where rows are no vectors for all.
    pub(crate) attend: ComputeKernel,
    /// For many, where rows are vectors.
    pub(crate) attend_tile: Option<ComputeKernel>,
    pub(crate) merge: ComputeKernel,
    pub(crate) elementwise: ComputeKernel,
    pub(crate) columns: ComputeKernel,
    pub(crate) magnitude: ComputeKernel,
    pub(crate) likeliest: ComputeKernel,
    pub(crate) top_k: ComputeKernel,
    products: Vec<(DType, Products)>,
    experts: Option<ExpertKernels>,
    states: Option<StateKernels>,
    blocks: Option<BlockKernels>,
}

/// The products of a weight type.
#[derive(Debug)]
pub(crate) struct Products {
    /// With up to [`FEW_TOKENS`].
    pub(crate) few: ComputeKernel,
    /// With more.
    pub(crate) many: ComputeKernel,
}

/// What models with experts take.
#[derive(Debug)]
pub(crate) struct ExpertKernels {
    pub(crate) route: ComputeKernel,
    pub(crate) bands: ComputeKernel,
    pub(crate) every: ComputeKernel,
    pub(crate) combine: ComputeKernel,
    products: Vec<(DType, Products)>,
}

/// What KV rows of blocks of bytes take.
#[derive(Debug)]
pub(crate) struct BlockKernels {
    pub(crate) store: ComputeKernel,
    pub(crate) hadamard: ComputeKernel,
}

/// What models with states take.
#[derive(Debug)]
pub(crate) struct StateKernels {
    pub(crate) convolve: ComputeKernel,
    pub(crate) scan: ComputeKernel,
}

impl Kernels {
    /// Compiles those that a model takes: some milliseconds each.
    ///
    /// With `integer_dot`, products of packed bytes are one instruction, which the device has to have.
    pub(crate) fn new(
        compute: &Compute,
        wanted: &Wanted,
        integer_dot: bool,
    ) -> Result<Self, DeviceError> {
        let compile = |module: &Module| -> Result<ComputeKernel, DeviceError> {
            let code = match module.dotted {
                Some(dotted) if integer_dot => dotted,
                _ => module.code,
            };
            // SAFETY: C1 of the device by K1.
            let kernel = unsafe { compute.kernel(code, module.entry)? };
            Ok(kernel.named(module.name))
        };
        let looks_pages_up = compute.looks_pages_up();
        let compile_rows = |modules: &RowModules| compile(modules.get(looks_pages_up));
        let products = |types: &[DType], [few, many]: [fn(&ProductModules) -> &Module; 2]| {
            let wanted = PRODUCTS.iter().filter(|(dtype, _)| types.contains(dtype));
            let compiled = wanted.map(|(dtype, modules)| {
                let products = Products {
                    few: compile(few(modules))?,
                    many: compile(many(modules))?,
                };
                Ok((*dtype, products))
            });
            compiled.collect::<Result<Vec<_>, DeviceError>>()
        };
        let experts = match wanted.expert_types.is_empty() {
            true => None,
            false => Some(ExpertKernels {
                route: compile(&ROUTE)?,
                bands: compile(&BANDS)?,
                every: compile(&EVERY)?,
                combine: compile(&COMBINE)?,
                products: products(
                    &wanted.expert_types,
                    [|of| &of.few_of_experts, |of| &of.many_of_experts],
                )?,
            }),
        };
        let blocks = match wanted.blocks {
            false => None,
            true => Some(BlockKernels {
                store: compile_rows(&STORE_BLOCKS)?,
                hadamard: compile(&HADAMARD)?,
            }),
        };
        let states = match wanted.states {
            false => None,
            true => Some(StateKernels {
                convolve: compile_rows(&CONVOLVE)?,
                scan: compile_rows(&SCAN)?,
            }),
        };
        Ok(Self {
            norm: compile(&NORM)?,
            prepare: compile(&PREPARE)?,
            heads: compile_rows(&HEADS)?,
            quantize: compile(&QUANTIZE)?,
            rotate: compile(&ROTATE)?,
            store: compile_rows(&STORE)?,
            attend: compile_rows(match wanted.vectors {
                true => &ATTEND,
                false => &ATTEND_WORDS,
            })?,
            attend_tile: match wanted.vectors {
                true => Some(compile_rows(&ATTEND_MANY)?),
                false => None,
            },
            merge: compile(&MERGE)?,
            elementwise: compile(&ELEMENTWISE)?,
            columns: compile(&COLUMNS)?,
            magnitude: compile(&MAGNITUDE)?,
            likeliest: compile(&LIKELIEST)?,
            top_k: compile(&TOP_K)?,
            products: products(&wanted.types, [|of| &of.few, |of| &of.many])?,
            experts,
            states,
            blocks,
        })
    }

    /// The products of a weight type.
    ///
    /// # Panics
    /// For one that the kernels were not compiled with.
    pub(crate) fn products(&self, dtype: DType) -> &Products {
        find(&self.products, dtype)
    }

    /// What KV rows of blocks of bytes take.
    ///
    /// # Panics
    /// For kernels that were compiled for rows of floats.
    pub(crate) fn blocks(&self) -> &BlockKernels {
        let blocks = self.blocks.as_ref();
        blocks.expect("kernels are compiled for the elements of the cache")
    }

    /// What models with states take.
    ///
    /// # Panics
    /// For kernels that were compiled for one without.
    pub(crate) fn states(&self) -> &StateKernels {
        let states = self.states.as_ref();
        states.expect("kernels are compiled for the states of the model")
    }

    /// What models with experts take.
    ///
    /// # Panics
    /// For kernels that were compiled for one without.
    pub(crate) fn experts(&self) -> &ExpertKernels {
        let experts = self.experts.as_ref();
        experts.expect("kernels are compiled for the experts of the model")
    }
}

impl ExpertKernels {
    /// The products of a weight type.
    ///
    /// # Panics
    /// As [`Kernels::products`].
    pub(crate) fn products(&self, dtype: DType) -> &Products {
        find(&self.products, dtype)
    }
}

fn find(products: &[(DType, Products)], dtype: DType) -> &Products {
    let found = products.iter().find(|(known, _)| *known == dtype);
    let (_, found) = found.expect("kernels are compiled with all types of the model");
    found
}
