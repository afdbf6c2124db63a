#![expect(
    unsafe_code,
    reason = "kernels are code that the compiler does not see"
)]

//! The kernels: WGSL beside this file, and the SPIR-V that naga makes of it, committed. A test compiles it again and
//! compares.
//!
//! # Safety
//!
//! * **K1** The SPIR-V is what naga made of the sources, each of which has one entry point of the name that is given
//!   here and uses what C1 of `lacuna_pages::vulkan` allows: up to four storage buffers of group 0, from binding 0 on,
//!   and constants of at most 128 bytes (the longest has 84). Products of packed bytes by one instruction are in those
//!   called dotted alone, which are compiled where the device has them.

mod constants;
#[cfg(test)]
mod stored;
#[cfg(all(test, feature = "shaders"))]
mod tests;

use std::ffi::CStr;

use lacuna_kernels::DType;
use lacuna_pages::DeviceError;
use lacuna_pages::vulkan::{Compute, ComputeKernel};

pub(crate) use constants::{
    Attend, Constants, Elementwise, Heads, Merge, NONE, Norm, Prepare, Product, Quantize, Rotate,
    Store,
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
/// Rows of a partition of attention.
pub(crate) const PARTITION: usize = 256;

/// One module: what it is called, the name of its entry point, what it is compiled from, and what that gives.
struct Module {
    name: &'static str,
    entry: &'static CStr,
    #[cfg_attr(
        not(all(test, feature = "shaders")),
        expect(dead_code, reason = "for the test that compares")
    )]
    sources: &'static [&'static str],
    code: &'static [u8],
    /// The same with products of packed bytes by one instruction.
    dotted: Option<&'static [u8]>,
}

macro_rules! module {
    ($name:expr, $entry:literal, [$($source:literal),+]) => {
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
    ($name:expr, $entry:literal, [$($source:literal),+]) => {
        Module {
            dotted: Some(include_bytes!(concat!("spirv/dotted/", $name, ".spv"))),
            ..module!($name, $entry, [$($source),+])
        }
    };
}

/// The kernels of a weight type: for few tokens, and for many.
struct ProductModules {
    few: Module,
    many: Module,
}

macro_rules! floats {
    ($name:literal, [$($weights:literal),+]) => {
        ProductModules {
            few: module!(
                concat!("product_", $name), c"product",
                ["matrix.wgsl", "product.wgsl", "weights/floats.wgsl", $($weights),+]
            ),
            many: module!(
                concat!("tile_", $name), c"tile",
                ["matrix.wgsl", "tile_floats.wgsl", "leave.wgsl", "weights/floats.wgsl", $($weights),+]
            ),
        }
    };
}

macro_rules! blocks {
    ($name:literal, $weights:literal) => {
        ProductModules {
            few: dotted!(
                concat!("product_", $name),
                c"product",
                [
                    "matrix.wgsl",
                    "product.wgsl",
                    "weights/blocks.wgsl",
                    $weights
                ]
            ),
            many: dotted!(
                concat!("tile_", $name),
                c"tile",
                [
                    "matrix.wgsl",
                    "tile.wgsl",
                    "leave.wgsl",
                    "weights/blocks.wgsl",
                    $weights
                ]
            ),
        }
    };
}

const NORM: Module = module!("norm", c"norm", ["norm.wgsl"]);
const PREPARE: Module = module!("prepare", c"prepare", ["prepare.wgsl", "bytes.wgsl"]);
const QUANTIZE: Module = module!(
    "quantize",
    c"quantize",
    ["quantize.wgsl", "bytes.wgsl", "activations.wgsl"]
);
const HEADS: Module = module!("heads", c"heads", ["heads.wgsl", "halves.wgsl"]);
const ROTATE: Module = module!("rotate", c"rotate", ["rotate.wgsl"]);
const STORE: Module = module!("store", c"store", ["store.wgsl", "halves.wgsl"]);
const ATTEND: Module = module!("attend", c"attend", ["attend.wgsl", "rows.wgsl"]);
const MERGE: Module = module!(
    "merge",
    c"merge",
    ["merge.wgsl", "merging.wgsl", "rows.wgsl", "bytes.wgsl"]
);
const ELEMENTWISE: Module = module!(
    "elementwise",
    c"elementwise",
    ["elementwise.wgsl", "activations.wgsl"]
);

/// The products of each weight type that there are some for.
const PRODUCTS: [(DType, ProductModules); 11] = [
    (DType::F32, floats!("f32", ["weights/f32.wgsl"])),
    (
        DType::F16,
        floats!("f16", ["weights/halves.wgsl", "weights/f16.wgsl"]),
    ),
    (
        DType::Bf16,
        floats!("bf16", ["weights/halves.wgsl", "weights/bf16.wgsl"]),
    ),
    (DType::Q8_0, blocks!("q8_0", "weights/q8_0.wgsl")),
    (DType::Q4_0, blocks!("q4_0", "weights/q4_0.wgsl")),
    (DType::Q4_1, blocks!("q4_1", "weights/q4_1.wgsl")),
    (DType::Q5_0, blocks!("q5_0", "weights/q5_0.wgsl")),
    (DType::Q5_1, blocks!("q5_1", "weights/q5_1.wgsl")),
    (DType::Q4K, blocks!("q4_k", "weights/q4_k.wgsl")),
    (DType::Q5K, blocks!("q5_k", "weights/q5_k.wgsl")),
    (DType::Q6K, blocks!("q6_k", "weights/q6_k.wgsl")),
];

/// The weight types that there is a product for.
pub(crate) fn products() -> impl Iterator<Item = DType> {
    PRODUCTS.iter().map(|(dtype, _)| *dtype)
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
    pub(crate) attend: ComputeKernel,
    pub(crate) merge: ComputeKernel,
    pub(crate) elementwise: ComputeKernel,
    products: Vec<(DType, Products)>,
}

/// The products of a weight type.
#[derive(Debug)]
pub(crate) struct Products {
    /// With up to [`FEW_TOKENS`].
    pub(crate) few: ComputeKernel,
    /// With more.
    pub(crate) many: ComputeKernel,
}

impl Kernels {
    /// Compiles those that a model with matrices of `types` takes: some milliseconds each.
    ///
    /// With `integer_dot`, products of packed bytes are one instruction, which the device has to have.
    pub(crate) fn new(
        compute: &Compute,
        types: &[DType],
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
        let wanted = PRODUCTS.iter().filter(|(dtype, _)| types.contains(dtype));
        let products = wanted.map(|(dtype, modules)| {
            let products = Products {
                few: compile(&modules.few)?,
                many: compile(&modules.many)?,
            };
            Ok((*dtype, products))
        });
        Ok(Self {
            norm: compile(&NORM)?,
            prepare: compile(&PREPARE)?,
            heads: compile(&HEADS)?,
            quantize: compile(&QUANTIZE)?,
            rotate: compile(&ROTATE)?,
            store: compile(&STORE)?,
            attend: compile(&ATTEND)?,
            merge: compile(&MERGE)?,
            elementwise: compile(&ELEMENTWISE)?,
            products: products.collect::<Result<_, DeviceError>>()?,
        })
    }

    /// The products of a weight type.
    ///
    /// # Panics
    /// For one that the kernels were not compiled with.
    pub(crate) fn products(&self, dtype: DType) -> &Products {
        let mut products = self.products.iter();
        let found = products.find(|(known, _)| *known == dtype);
        let (_, found) = found.expect("kernels are compiled with all types of the model");
        found
    }
}
