//! Quantized weights in safetensors, which several tensors make together: as one tensor each, of a type
//! that can be computed with.
//!
//! ```text
//! config.json -> Form -> (weight, scales, ...) -> Entry whose bytes are made when it is asked for
//! ```
//!
//! A form is one file: how its tensors are called, what shapes they must have, and what a row of them is
//! worth. Nothing outside knows of forms: families find the tensors that they look for in any folder.
//! Types and shapes are checked when the folder is opened, numbers when they are converted.

mod awq;
mod blocks;
mod compressed;
mod error;
mod fp8;
mod gptq;
mod mlx;
mod mxfp4;
mod part;
mod transposed;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use lacuna_kernels::DType;
use serde_json::{Map, Value};

pub use error::FormError;

use crate::conversion::{Conversion, Rows};
use crate::tensor::{Contents, Entry, Storage, Tensors};
use part::Part;

/// Methods of quantization whose weights can be read.
const METHODS: &[&str] = &[
    "fp8",
    "fbgemm_fp8",
    "mxfp4",
    "compressed-tensors",
    "gptq",
    "awq",
    "mlx",
];

/// Replaces the tensors of quantized matrices by what they are worth, where `config` says that there are
/// some.
///
/// # Errors
/// [`FormError`] for a method or a variant that cannot be read, and for tensors that do not go together.
pub(super) fn read(config: &Map<String, Value>, tensors: &Tensors) -> Result<Tensors, FormError> {
    let mut table = Table::new(tensors);
    match described(config) {
        None => {
            mxfp4::read_plain(&mut table)?;
            transposed::read(config, &mut table)?;
        }
        Some(Described { method, settings }) => match method {
            "fp8" | "fbgemm_fp8" => fp8::read(settings, &mut table)?,
            "mxfp4" => mxfp4::read(&mut table)?,
            "compressed-tensors" => compressed::read(settings, &mut table)?,
            "gptq" => gptq::read(settings, &mut table)?,
            "awq" => awq::read(settings, &mut table)?,
            "mlx" => mlx::read(settings, &mut table)?,
            other => {
                return Err(FormError::Method {
                    method: other.to_owned(),
                    supported: METHODS,
                });
            }
        },
    }
    table.finish()
}

/// What a description says of quantization.
struct Described<'a> {
    method: &'a str,
    settings: &'a Map<String, Value>,
}

/// `quantization_config`, or what MLX and older files of compressed-tensors have in its place.
fn described(config: &Map<String, Value>) -> Option<Described<'_>> {
    let object = |name: &str| config.get(name)?.as_object();
    if let Some(settings) = object("quantization") {
        let method = "mlx";
        return Some(Described { method, settings });
    }
    let settings = object("quantization_config").or_else(|| object("compression_config"))?;
    let method = match settings.get("quant_method").and_then(Value::as_str) {
        Some(method) => method,
        // MLX writes its settings here too, without a method.
        None if settings.contains_key("bits") && settings.contains_key("group_size") => "mlx",
        None => "no method",
    };
    Some(Described { method, settings })
}

/// The tensors of a folder, some of which are taken and have others put in their place.
struct Table<'a> {
    tensors: &'a Tensors,
    taken: HashSet<&'a str>,
    /// By the tensor whose place they take.
    made: HashMap<&'a str, Vec<Entry>>,
}

/// One tensor that takes the place of others.
struct Made {
    name: String,
    /// What it was, for people.
    form: &'static str,
    dtype: DType,
    /// Outermost first.
    shape: Vec<usize>,
    rows: Box<dyn Rows>,
}

impl<'a> Table<'a> {
    fn new(tensors: &'a Tensors) -> Self {
        Self {
            tensors,
            taken: HashSet::new(),
            made: HashMap::new(),
        }
    }

    /// Names of tensors that end so, without that ending and whole.
    fn ending(&self, ending: &str) -> Vec<(&'a str, &'a str)> {
        let names = self.tensors.entries().iter().map(|entry| &*entry.name);
        let found = names.filter_map(|name| Some((name.strip_suffix(ending)?, name)));
        found.collect()
    }

    /// Takes a tensor, if there is one of this name.
    fn take(&mut self, name: &str) -> Option<Part> {
        let entry = self.tensors.find(name)?;
        self.taken.insert(&entry.name);
        Some(Part::new(entry))
    }

    /// Takes a tensor that `of` needs.
    fn require(&mut self, name: &str, of: &str) -> Result<Part, FormError> {
        self.take(name).ok_or_else(|| FormError::Missing {
            part: name.to_owned(),
            of: of.to_owned(),
        })
    }

    /// Takes tensors of these endings away: they are about activations or the KV cache, which are not
    /// quantized as the file would have it.
    fn leave_out(&mut self, endings: &[&str]) {
        let names = self.tensors.entries().iter().map(|entry| &*entry.name);
        let is_out = |name: &&str| endings.iter().any(|ending| name.ends_with(ending));
        self.taken.extend(names.filter(is_out));
    }

    /// Puts a tensor where `at` was, which has been taken.
    fn put(&mut self, at: &'a str, made: Made) -> Result<(), FormError> {
        let Made {
            name,
            form,
            dtype,
            shape,
            rows,
        } = made;
        let too_large = || FormError::TooLarge { name: name.clone() };
        let (columns, stack) = shape.split_last().ok_or_else(too_large)?;
        // No product of sizes may overflow, nor bytes of elements, also where there are none.
        let elements = shape
            .iter()
            .try_fold(size_of::<f64>(), |all, &size| all.checked_mul(size.max(1)));
        let row_bytes = elements.and_then(|_| dtype.row_bytes(*columns));
        let conversion = row_bytes.and_then(|row_bytes| {
            let count = stack.iter().product();
            Conversion::new(form, count, row_bytes, rows)
        });
        let conversion = conversion.ok_or_else(too_large)?;
        self.made.entry(at).or_default().push(Entry {
            name: name.into(),
            storage: Storage::Known(dtype),
            shape: shape.into(),
            contents: Contents::Converted(Arc::new(conversion)),
        });
        Ok(())
    }

    fn finish(mut self) -> Result<Tensors, FormError> {
        if self.taken.is_empty() {
            return Ok(self.tensors.clone());
        }
        let mut entries = Vec::with_capacity(self.tensors.len());
        for entry in self.tensors.entries() {
            if let Some(made) = self.made.remove(&*entry.name) {
                entries.extend(made);
            } else if !self.taken.contains(&*entry.name) {
                entries.push(entry.clone());
            }
        }
        let all = self.tensors.entries().iter();
        let sources = all.filter(|entry| self.taken.contains(&*entry.name));
        let tensors = self.tensors.with_entries(entries, sources);
        tensors.map_err(|name| FormError::Twice { name })
    }
}

/// A field of the settings that is text, in lower case.
fn text(settings: &Map<String, Value>, field: &str) -> Option<String> {
    settings.get(field)?.as_str().map(str::to_lowercase)
}

/// Refuses a field that is there and is not one of `allowed`.
fn expect(
    settings: &Map<String, Value>,
    field: &str,
    allowed: &[&str],
    expected: &'static str,
) -> Result<(), FormError> {
    let fits = match settings.get(field) {
        None | Some(Value::Null) => true,
        Some(value) => {
            let shown = value
                .as_str()
                .map_or_else(|| value.to_string(), str::to_lowercase);
            allowed.contains(&shown.as_str())
        }
    };
    match fits {
        true => Ok(()),
        false => Err(unsupported(settings, field, expected)),
    }
}

fn unsupported(settings: &Map<String, Value>, field: &str, expected: &'static str) -> FormError {
    FormError::Setting {
        field: field.to_owned(),
        found: settings
            .get(field)
            .map_or_else(|| "missing".to_owned(), shown),
        expected,
    }
}

/// A value of the description, cut short.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// Columns of a group, where `groups` of them are a row and the description may have said a size.
fn group_of(
    columns: usize,
    groups: usize,
    said: Option<usize>,
    scales: &Part,
) -> Result<usize, FormError> {
    let is_whole = groups > 0 && columns > 0 && columns.is_multiple_of(groups);
    let as_said = |said| groups == 1 || Some(columns) == groups.checked_mul(said);
    match is_whole && said.is_none_or(as_said) {
        true => Ok(columns / groups),
        false => Err(FormError::Groups {
            name: scales.name().to_owned(),
            columns,
            groups,
        }),
    }
}

/// `group_size` of the settings; none where a row is one group, or where matrices have settings of their
/// own.
fn said_group(settings: &Map<String, Value>) -> Option<usize> {
    if settings.get("dynamic").is_some_and(|own| !own.is_null()) {
        return None;
    }
    let said = settings.get("group_size")?.as_u64()?;
    usize::try_from(said).ok()
}

#[cfg(test)]
mod tests;
