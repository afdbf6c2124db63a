//! The tensors that a quantized matrix is stored as: numbers of checked type and shape.

use half::{bf16, f16};

use super::FormError;
use crate::tensor::{Contents, Entry};

/// A tensor of any type, as its bytes.
#[derive(Debug, Clone)]
pub(super) struct Part(Entry);

impl Part {
    pub(super) fn new(entry: &Entry) -> Self {
        Self(entry.clone())
    }

    pub(super) fn name(&self) -> &str {
        &self.0.name
    }

    /// Outermost first.
    pub(super) fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    /// The type as the file calls it, in lower case.
    pub(super) fn type_name(&self) -> &str {
        self.0.storage.name()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        match &self.0.contents {
            Contents::Mapped { data, range } => &data[range.clone()],
            Contents::Converted(_) => unreachable!("parts are tensors of files"),
        }
    }

    /// All dimensions but the last, of which there must be one at least, and that.
    pub(super) fn rows(&self) -> Result<(&[usize], usize), FormError> {
        match self.shape() {
            [leading @ .., columns] if !leading.is_empty() => Ok((leading, *columns)),
            _ => Err(self.misshapen("a matrix".to_owned())),
        }
    }

    /// The dimensions of a matrix.
    pub(super) fn matrix(&self) -> Result<[usize; 2], FormError> {
        let shape = <[usize; 2]>::try_from(self.shape());
        shape.map_err(|_| self.misshapen("a matrix".to_owned()))
    }

    /// The same, if it has this shape.
    pub(super) fn shaped(self, shape: &[usize]) -> Result<Self, FormError> {
        match self.shape() == shape {
            true => Ok(self),
            false => Err(self.misshapen(format!("{shape:?}"))),
        }
    }

    /// The same, if it has one of these types.
    pub(super) fn typed(self, types: &[&str], expected: &'static str) -> Result<Self, FormError> {
        match types.contains(&self.type_name()) {
            true => Ok(self),
            false => Err(FormError::Type {
                name: self.name().to_owned(),
                found: self.type_name().to_owned(),
                expected,
            }),
        }
    }

    pub(super) fn misshapen(&self, expected: String) -> FormError {
        FormError::Shape {
            name: self.name().to_owned(),
            found: self.shape().to_vec(),
            expected,
        }
    }

    /// As numbers, read one at a time.
    pub(super) fn floats(self) -> Result<Floats, FormError> {
        let part = self.typed(
            &["f32", "f16", "bf16", "f8_e8m0"],
            "f32, f16, bf16 or f8_e8m0",
        )?;
        let read: fn(&[u8], usize) -> f32 = match part.type_name() {
            "f32" => |bytes, index| f32::from_bits(word(bytes, index)),
            "f16" => |bytes, index| f16::from_bits(half_word(bytes, index)).to_f32(),
            "bf16" => |bytes, index| bf16::from_bits(half_word(bytes, index)).to_f32(),
            _ => |bytes, index| power_of_two(bytes[index]),
        };
        Ok(Floats { part, read })
    }

    /// As words of 32 bits.
    pub(super) fn words(self) -> Result<Words, FormError> {
        self.typed(&["i32", "u32"], "i32 or u32").map(Words)
    }
}

/// Numbers of some type as `f32`.
#[derive(Debug, Clone)]
pub(super) struct Floats {
    pub(super) part: Part,
    read: fn(&[u8], usize) -> f32,
}

impl Floats {
    pub(super) fn get(&self, index: usize) -> f32 {
        (self.read)(self.part.bytes(), index)
    }
}

/// Words of 32 bits.
#[derive(Debug, Clone)]
pub(super) struct Words(pub(super) Part);

impl Words {
    pub(super) fn get(&self, index: usize) -> u32 {
        word(self.0.bytes(), index)
    }

    /// The words at `first`, `first + step`, and so on.
    pub(super) fn every(&self, first: usize, step: usize) -> impl Iterator<Item = u32> + '_ {
        let bytes = self.0.bytes();
        (first..bytes.len() / 4)
            .step_by(step)
            .map(move |index| word(bytes, index))
    }
}

/// `2^(exponent - 127)`, where 255 is no number.
pub(super) fn power_of_two(exponent: u8) -> f32 {
    match exponent {
        // The only one below the normal range.
        0 => f32::MIN_POSITIVE / 2.0,
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(exponent) << 23),
    }
}

fn word(bytes: &[u8], index: usize) -> u32 {
    let bytes = bytes[4 * index..].first_chunk();
    u32::from_le_bytes(*bytes.expect("inside the tensor"))
}

fn half_word(bytes: &[u8], index: usize) -> u16 {
    let bytes = bytes[2 * index..].first_chunk();
    u16::from_le_bytes(*bytes.expect("inside the tensor"))
}
