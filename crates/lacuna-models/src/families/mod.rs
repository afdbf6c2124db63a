//! Families of models: one file each, a function from what a model file says to a [`ModelSpec`].
//!
//! A family's file holds everything that is particular to it: its names, which of a file's numbers
//! mean what, and how its tensors are called. `build.rs` finds the files, so adding a family is adding
//! one here and a fixture under `reference/`.

mod decoder;
mod encoder;
mod experts;
mod facts;
mod gemma4_vision;
pub(crate) mod heads;
mod idefics3;
mod names;
mod pixtral;
mod qwen_vision;
mod sentence_transformers;
mod shape;
mod siglip;
mod vision;

use crate::error::ConfigError;
use crate::plan::WeightPlan;
use crate::program::TensorName;
use crate::spec::{HeadKind, HeadSpec, ModelSpec};
use crate::weights;
use lacuna_files::gguf::Metadata;
use lacuna_files::huggingface::{Config, Folder};

pub(crate) use facts::{Facts, Found, Given as GivenFact};
pub use shape::{Given, Shape, SpecialTokens};
use siglip::SIGLIP;
pub(crate) use vision::{describe as images, describe_gguf as images_of_gguf};

pub(crate) use names::{FUSED, Naming, Spelling};

// `FAMILIES`, and a module for each file of this folder that declares a family.
include!(concat!(env!("OUT_DIR"), "/families.rs"));

/// One family of models.
#[derive(Debug)]
pub(crate) struct Family {
    /// `general.architecture` in GGUF.
    pub(crate) name: &'static str,
    /// Entries of `architectures` in a Hugging Face `config.json`.
    pub(crate) classes: &'static [&'static str],
    /// Reads a model's description.
    pub(crate) spec: fn(&Facts<'_>) -> Result<ModelSpec, ConfigError>,
    /// How tensors are called in Hugging Face files.
    pub(crate) naming: Naming,
    /// Published models that synthetic ones are made after.
    pub(crate) shapes: &'static [Shape],
}

/// The shapes of published models of all families, each family's smallest first.
pub fn shapes() -> impl Iterator<Item = &'static Shape> {
    FAMILIES.iter().flat_map(|family| family.shapes)
}

/// The shapes of encoders of images, whose files are beside those of models.
pub fn encoder_shapes() -> impl Iterator<Item = &'static Shape> {
    SIGLIP.shapes.iter()
}

/// What a file says a model is.
#[derive(Debug, Clone)]
pub struct Description {
    /// Its layers and constants, validated.
    pub spec: ModelSpec,
    pub(crate) family: &'static Family,
    pub(crate) spelling: Spelling,
    /// The head that guesses tokens, if there is one: what is computed with it is another model's part.
    pub(crate) head: Option<HeadSpec>,
}

impl Description {
    /// Whether the files have a head that guesses tokens (multi-token prediction), or one stands beside them (EAGLE-3).
    #[must_use]
    pub const fn has_head(&self) -> bool {
        self.head.is_some()
    }

    /// The same model with its head, if it has one: what is made of it takes memory for that, and can guess.
    #[must_use]
    pub fn with_head(mut self) -> Self {
        self.spec.head = self.head.clone();
        self
    }

    /// Reads GGUF metadata. `vocabulary` is the number of rows of the embedding table, and
    /// `rows_of` that of the tensor of a name, if the file has one.
    ///
    /// # Errors
    /// [`ConfigError`] for an unknown architecture, a missing key, or numbers out of range.
    pub fn from_gguf(
        metadata: &Metadata,
        vocabulary: usize,
        rows_of: &dyn Fn(&str) -> Option<usize>,
    ) -> Result<Self, ConfigError> {
        let name = metadata.require("general.architecture")?;
        let family = find(name, |family| family.name == name)?;
        let facts = Facts::gguf(metadata, family.name, vocabulary, rows_of);
        let mut description = Self::of(family, Spelling::Gguf, &facts)?;
        encoder::see_both_sides_if_said(&mut description.spec, &facts)?;
        description.spec.validate()?;
        Ok(description)
    }

    /// Reads a Hugging Face folder's `config.json`, and what sentence-transformers has put beside it.
    ///
    /// # Errors
    /// [`ConfigError`] for an unknown architecture, unsupported features, or numbers out of range.
    pub fn from_huggingface(folder: &Folder) -> Result<Self, ConfigError> {
        Self::with_facts(folder).map(|(description, _)| description)
    }

    /// Reads a `config.json`.
    ///
    /// # Errors
    /// As [`Description::from_huggingface`].
    pub fn from_config(config: &Config) -> Result<Self, ConfigError> {
        let (family, facts) = Self::facts(config)?;
        Self::of(family, Spelling::HuggingFace, &facts)
    }

    /// A folder's description, and what of it GGUF files say in words of their own.
    pub(crate) fn with_facts(folder: &Folder) -> Result<(Self, Found), ConfigError> {
        let (family, facts) = Self::facts(folder.config())?;
        let mut description = Self::of(family, Spelling::HuggingFace, &facts)?;
        sentence_transformers::apply(&mut description.spec, folder)?;
        encoder::see_both_sides_if_said(&mut description.spec, &facts)?;
        description.spec.validate()?;
        Ok((description, facts.into_found()))
    }

    fn facts(config: &Config) -> Result<(&'static Family, Facts<'_>), ConfigError> {
        let class = config.class();
        let family = find(class, |family| family.classes.contains(&class))?;
        Ok((family, Facts::huggingface(config, family.name)))
    }

    /// What files of this kind call a tensor.
    pub(crate) fn tensor_name(&self, name: TensorName, suffix: &str) -> String {
        self.family.naming.full(self.spelling, name, suffix)
    }

    /// The part that GGUF files of the family have a matrix in with others, where that is so.
    pub(crate) fn fused_in_gguf(&self, part: &str) -> Option<&'static str> {
        let fused = self.family.naming.gguf_fused;
        let mut whole = FUSED
            .iter()
            .filter(|(whole, parts)| fused.contains(whole) && parts.contains(&part));
        whole.next().map(|(whole, _)| *whole)
    }

    /// Whether a tensor of this name is of layers ahead, the head's among them, and computed with.
    pub(crate) fn is_ahead(&self, name: &str) -> Option<bool> {
        let head = self.spec.head.as_ref().map(|head| &head.kind);
        if name.starts_with(heads::PREFIX) {
            return Some(head.is_some_and(|kind| *kind != HeadKind::Mtp));
        }
        let of_head = |rest: &str| {
            // Copies of tensors that the model has itself.
            let copied = [
                "embed_tokens.",
                "nextn.embed_tokens.",
                "shared_head.head.",
                "nextn.shared_head_head.",
            ];
            head == Some(&HeadKind::Mtp) && !copied.iter().any(|copy| rest.starts_with(copy))
        };
        let (first, count) = (self.spec.layers.len(), self.spec.layers_ahead);
        if let (Some(head), Spelling::HuggingFace) = (self.family.naming.head, self.spelling) {
            let rest = name.strip_prefix(head)?.strip_prefix('.')?;
            let other = rest.starts_with("layers.") && !rest.starts_with("layers.0.");
            return Some(!other && of_head(rest));
        }
        let layers = match self.spelling {
            Spelling::Gguf => "blk.",
            Spelling::HuggingFace => "layers.",
        };
        let (_, numbered) = name.split_once(layers)?;
        let (number, rest) = numbered.split_once('.')?;
        let ahead = number.parse::<usize>().ok()?.checked_sub(first)?;
        (ahead < count).then(|| ahead == 0 && of_head(rest))
    }

    /// Of the bytes of `weights`, which are those of the model described, those that computing one token
    /// reads: the experts that a token has, and of tables that are only looked up in, a row.
    #[must_use]
    pub fn active_bytes(&self, weights: &WeightPlan) -> u64 {
        weights::active_bytes(self, weights)
    }

    fn of(
        family: &'static Family,
        spelling: Spelling,
        facts: &Facts<'_>,
    ) -> Result<Self, ConfigError> {
        let mut spec = (family.spec)(facts)?;
        encoder::pool_if_said(&mut spec, facts)?;
        spec.validate()?;
        Ok(Self {
            head: spec.head.take(),
            spec,
            family,
            spelling,
        })
    }
}

/// The names of all families, as GGUF spells them.
#[must_use]
pub fn names() -> Vec<&'static str> {
    FAMILIES.iter().map(|family| family.name).collect()
}

fn find(name: &str, matches: impl Fn(&Family) -> bool) -> Result<&'static Family, ConfigError> {
    let found = FAMILIES.iter().copied().find(|family| matches(family));
    found.ok_or_else(|| ConfigError::UnknownFamily {
        name: name.to_owned(),
        known: names(),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;

    /// All Rust files of the workspace's sources.
    fn sources() -> Vec<PathBuf> {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut folders: Vec<PathBuf> = fs::read_dir(crates)
            .expect("the workspace's crates")
            .map(|entry| entry.expect("readable").path().join("src"))
            .filter(|folder| folder.is_dir())
            .collect();
        let mut files = Vec::new();
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).expect("readable") {
                let path = entry.expect("readable").path();
                match path.is_dir() {
                    true => folders.push(path),
                    false => files.push(path),
                }
            }
        }
        files
    }

    /// Adding a family is adding its file: no other source names one. Names of pre-tokenizers, which
    /// some share, are of vocabularies; tests name what they test.
    #[test]
    fn no_file_but_its_own_names_a_family() {
        for path in sources() {
            let shown = path.display().to_string();
            let is_family = shown.contains("families") && !shown.ends_with("mod.rs");
            let others = ["tokenizer", "vocabulary", "tests", "examples"];
            if is_family || others.iter().any(|other| shown.contains(other)) {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap_or_default();
            // What comes after is tests; comments have examples.
            let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
            let code = text
                .lines()
                .filter(|line| !line.trim_start().starts_with("//"));
            let text: String = code.collect();
            for family in FAMILIES {
                let names = family.classes.iter().chain([&family.name]);
                for name in names {
                    let quoted = format!("\"{name}\"");
                    assert!(!text.contains(&quoted), "{shown} names {name}");
                }
            }
        }
    }

    #[test]
    fn no_two_families_or_shapes_have_the_same_name() {
        let mut all: Vec<&str> = names();
        all.extend(FAMILIES.iter().flat_map(|family| family.classes));
        all.extend(shapes().map(|shape| shape.name));
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }
}
