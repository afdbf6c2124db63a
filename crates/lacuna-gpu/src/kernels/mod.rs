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
//!   and constants of at most 128 bytes (the longest has 84).

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
/// Rows of a matrix that a workgroup of a product has.
pub(crate) const PRODUCT_ROWS: u32 = 8;
/// Tokens that it has at most.
pub(crate) const PRODUCT_TOKENS: u32 = 4;
/// Rows of a partition of attention.
pub(crate) const PARTITION: usize = 256;

/// One module: what it is called, the name of its entry point, what it is compiled from, and what that gives.
struct Module {
    #[cfg_attr(
        not(all(test, feature = "shaders")),
        expect(dead_code, reason = "for the test that compares")
    )]
    name: &'static str,
    entry: &'static CStr,
    #[cfg_attr(
        not(all(test, feature = "shaders")),
        expect(dead_code, reason = "for the test that compares")
    )]
    sources: &'static [&'static str],
    code: &'static [u8],
}

macro_rules! module {
    ($name:literal, $entry:literal, [$($source:literal),+]) => {
        Module {
            name: $name,
            entry: $entry,
            sources: &[$(include_str!($source)),+],
            code: include_bytes!(concat!("spirv/", $name, ".spv")),
        }
    };
}

macro_rules! product {
    ($name:literal, $kind:literal, [$($more:literal),*]) => {
        module!($name, c"product", ["product.wgsl", $kind, $($more),*])
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

/// The product of each weight type there is one for.
const PRODUCTS: [(DType, Module); 11] = [
    (
        DType::F32,
        product!("product_f32", "weights/floats.wgsl", ["weights/f32.wgsl"]),
    ),
    (
        DType::F16,
        product!("product_f16", "weights/floats.wgsl", ["weights/f16.wgsl"]),
    ),
    (
        DType::Bf16,
        product!("product_bf16", "weights/floats.wgsl", ["weights/bf16.wgsl"]),
    ),
    (
        DType::Q8_0,
        product!("product_q8_0", "weights/blocks.wgsl", ["weights/q8_0.wgsl"]),
    ),
    (
        DType::Q4_0,
        product!("product_q4_0", "weights/blocks.wgsl", ["weights/q4_0.wgsl"]),
    ),
    (
        DType::Q4_1,
        product!("product_q4_1", "weights/blocks.wgsl", ["weights/q4_1.wgsl"]),
    ),
    (
        DType::Q5_0,
        product!(
            "product_q5_0",
            "weights/blocks.wgsl",
            ["weights/fifth.wgsl", "weights/q5_0.wgsl"]
        ),
    ),
    (
        DType::Q5_1,
        product!(
            "product_q5_1",
            "weights/blocks.wgsl",
            ["weights/fifth.wgsl", "weights/q5_1.wgsl"]
        ),
    ),
    (
        DType::Q4K,
        product!(
            "product_q4_k",
            "weights/blocks.wgsl",
            ["weights/nested.wgsl", "weights/q4_k.wgsl"]
        ),
    ),
    (
        DType::Q5K,
        product!(
            "product_q5_k",
            "weights/blocks.wgsl",
            ["weights/nested.wgsl", "weights/q5_k.wgsl"]
        ),
    ),
    (
        DType::Q6K,
        product!("product_q6_k", "weights/blocks.wgsl", ["weights/q6_k.wgsl"]),
    ),
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
    products: Vec<(DType, ComputeKernel)>,
}

impl Kernels {
    /// Compiles those that a model with matrices of `types` takes: some milliseconds each.
    pub(crate) fn new(compute: &Compute, types: &[DType]) -> Result<Self, DeviceError> {
        let wanted = PRODUCTS.iter().filter(|(dtype, _)| types.contains(dtype));
        let products = wanted.map(|(dtype, module)| Ok((*dtype, compile(compute, module)?)));
        Ok(Self {
            norm: compile(compute, &NORM)?,
            prepare: compile(compute, &PREPARE)?,
            heads: compile(compute, &HEADS)?,
            quantize: compile(compute, &QUANTIZE)?,
            rotate: compile(compute, &ROTATE)?,
            store: compile(compute, &STORE)?,
            attend: compile(compute, &ATTEND)?,
            merge: compile(compute, &MERGE)?,
            elementwise: compile(compute, &ELEMENTWISE)?,
            products: products.collect::<Result<_, DeviceError>>()?,
        })
    }

    /// The product of a weight type.
    ///
    /// # Panics
    /// For one that the kernels were not compiled with.
    pub(crate) fn product(&self, dtype: DType) -> &ComputeKernel {
        let mut products = self.products.iter();
        let product = products.find(|(known, _)| *known == dtype);
        let (_, product) = product.expect("kernels are compiled with all types of the model");
        product
    }
}

fn compile(compute: &Compute, module: &Module) -> Result<ComputeKernel, DeviceError> {
    // SAFETY: C1 of the device by K1.
    unsafe { compute.kernel(module.code, module.entry) }
}
