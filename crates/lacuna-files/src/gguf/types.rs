//! GGUF's numbers for element types of tensors and value types of metadata.
//!
//! Source: `ggml.h` (`enum ggml_type`), `gguf.h` (`enum gguf_type`), and the block sizes in
//! gguf-py's `GGML_QUANT_SIZES`.

use lacuna_kernels::DType;

/// A tensor element type as GGUF numbers it, whether or not it can be computed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ElementType {
    /// A type with kernels.
    Known(DType),
    /// A type whose layout is known, so that bounds can be checked, but which has no kernels.
    Foreign {
        name: &'static str,
        block_len: usize,
        block_bytes: usize,
    },
    /// A number we have never heard of.
    Unknown(u32),
}

impl ElementType {
    pub(super) fn from_id(id: u32) -> Self {
        let foreign = |name, block_len, block_bytes| Self::Foreign {
            name,
            block_len,
            block_bytes,
        };
        let known = DType::ALL
            .into_iter()
            .find(|dtype| element_id(*dtype) == id);
        if let Some(dtype) = known {
            return Self::Known(dtype);
        }
        match id {
            19 => foreign("iq1_s", 256, 50),
            24 => foreign("i8", 1, 1),
            25 => foreign("i16", 1, 2),
            I32 => foreign("i32", 1, 4),
            I64 => foreign("i64", 1, 8),
            28 => foreign("f64", 1, 8),
            29 => foreign("iq1_m", 256, 56),
            40 => foreign("nvfp4", 64, 36),
            other => Self::Unknown(other),
        }
    }

    /// Elements and bytes per block, when the type is known at all.
    pub(super) fn block(self) -> Option<(usize, usize)> {
        match self {
            Self::Known(dtype) => Some((dtype.block_len(), dtype.block_bytes())),
            Self::Foreign {
                block_len,
                block_bytes,
                ..
            } => Some((block_len, block_bytes)),
            Self::Unknown(_) => None,
        }
    }

    pub(super) fn name(self) -> String {
        match self {
            Self::Known(dtype) => dtype.name().to_owned(),
            Self::Foreign { name, .. } => name.to_owned(),
            Self::Unknown(id) => format!("number {id}"),
        }
    }
}

/// GGUF's numbers for whole numbers of 32 and 64 bits.
const I32: u32 = 26;
const I64: u32 = 27;

/// Whole numbers that tensors may be lists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Integers {
    /// Of 32 bits.
    I32,
    /// Of 64 bits.
    I64,
}

impl Integers {
    /// Those of a name in [`Summary::type_name`](crate::Summary::type_name), if it is one of theirs.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        match name {
            "i32" => Some(Self::I32),
            "i64" => Some(Self::I64),
            _ => None,
        }
    }

    /// The bytes of `numbers` in GGUF's order. Of 32 bits, numbers beyond those lose their upper ones.
    #[must_use]
    pub fn encode(self, numbers: &[i64]) -> Vec<u8> {
        let numbers = numbers.iter();
        match self {
            Self::I32 => numbers.flat_map(|it| (*it as i32).to_le_bytes()).collect(),
            Self::I64 => numbers.flat_map(|it| it.to_le_bytes()).collect(),
        }
    }

    /// GGUF's number for them, and bytes of one.
    pub(super) const fn element(self) -> (u32, usize) {
        match self {
            Self::I32 => (I32, 4),
            Self::I64 => (I64, 8),
        }
    }
}

/// GGUF's number for an element type.
pub(super) const fn element_id(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Q4_0 => 2,
        DType::Q4_1 => 3,
        DType::Q5_0 => 6,
        DType::Q5_1 => 7,
        DType::Q8_0 => 8,
        DType::Q2K => 10,
        DType::Q3K => 11,
        DType::Q4K => 12,
        DType::Q5K => 13,
        DType::Q6K => 14,
        DType::Iq2Xxs => 16,
        DType::Iq2Xs => 17,
        DType::Iq3Xxs => 18,
        DType::Iq4Nl => 20,
        DType::Iq3S => 21,
        DType::Iq2S => 22,
        DType::Iq4Xs => 23,
        DType::Bf16 => 30,
        DType::Tq1_0 => 34,
        DType::Tq2_0 => 35,
        DType::Mxfp4 => 39,
    }
}

/// The type of a metadata value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueType {
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 8-bit integer.
    I8,
    /// Unsigned 16-bit integer.
    U16,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned 32-bit integer.
    U32,
    /// Signed 32-bit integer.
    I32,
    /// 32-bit floating point.
    F32,
    /// A truth value in one byte.
    Bool,
    /// Length-prefixed text.
    String,
    /// A counted sequence of values of one type.
    Array,
    /// Unsigned 64-bit integer.
    U64,
    /// Signed 64-bit integer.
    I64,
    /// 64-bit floating point.
    F64,
}

impl ValueType {
    /// In the order of GGUF's numbers.
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    pub(super) fn from_id(id: u32) -> Option<Self> {
        usize::try_from(id)
            .ok()
            .and_then(|id| Self::ALL.get(id).copied())
    }

    pub(super) const fn id(self) -> u32 {
        self as u32
    }

    /// Bytes of a value, when that does not depend on the value.
    pub(super) const fn fixed_bytes(self) -> Option<usize> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::String | Self::Array => None,
        }
    }

    /// The fewest bytes a value can take: a string's length, an array's element type and count.
    pub(super) const fn least_bytes(self) -> usize {
        match (self, self.fixed_bytes()) {
            (_, Some(bytes)) => bytes,
            (Self::String, None) => 8,
            (_, None) => 12,
        }
    }

    /// The name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::String => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        }
    }
}
