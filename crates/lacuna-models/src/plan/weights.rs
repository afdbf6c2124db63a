//! The weights of a model as its directory of tensors has them.

use std::collections::{HashMap, HashSet};

use super::residency::{Residency, WeightUse, held};
use super::{ExpertUse, NeuronUse};
use crate::families::Description;
use crate::program::Program;
use crate::weights::{Derived, Names, derived, expert_uses, is_outside, uses};
use lacuna_files::{Mapping, Summary, Tensors, TypeTotal};

/// One tensor of the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Weight {
    /// The name in the file.
    pub name: String,
    /// The element type's name in lower case.
    pub type_name: String,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Bytes: in the file, or of memory where it is converted.
    pub bytes: usize,
    /// What it is stored as in the file, where it is converted when it is loaded.
    pub converted_from: Option<&'static str>,
    /// Whether nothing is computed with it: it is of a part that sees, or of layers ahead that are not used.
    pub is_left_out: bool,
}

impl Weight {
    fn summary(&self) -> Summary<'_> {
        Summary {
            name: &self.name,
            type_name: &self.type_name,
            shape: &self.shape,
            bytes: self.bytes,
            converted_from: self.converted_from,
        }
    }

    /// Whether its elements become `f32` apart from the file: norms and biases, those of experts in one
    /// tensor of all.
    fn is_copied(&self) -> bool {
        self.shape.len() <= 1 || self.name.ends_with("bias")
    }
}

/// All tensors of a model, in file order. They are used where the file is mapped or read into memory, as a
/// [`Residency`] says, but for vectors, which are norms and biases and are copied out as `f32`, for matrices in
/// forms that cannot be computed from, which are converted, and for some that are made of others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WeightPlan {
    /// Every tensor.
    pub tensors: Vec<Weight>,
    /// Matrices that are made when the model is loaded, under the names of the tensors they are made of:
    /// keys of latent attention, which files have the other way round.
    pub derived: Vec<Weight>,
    /// What a pass uses of them, in order.
    pub uses: Vec<WeightUse>,
    /// What it uses of experts, of which a token has a few, in order.
    pub experts: Vec<ExpertUse>,
    /// Matrices of which it uses columns, those whose activations are not zero, in order.
    pub neurons: Vec<NeuronUse>,
    /// Whether they are in files, which can be read, and not in memory that stands in for some.
    pub in_files: bool,
    /// Where they are, of a model that is loaded.
    pub loaded: Option<Residency>,
}

impl WeightPlan {
    /// The tensors of a file with a model as described.
    #[must_use]
    pub fn of(tensors: &Tensors, description: &Description) -> Self {
        let weight = |tensor: Summary<'_>| Weight {
            name: tensor.name.to_owned(),
            type_name: tensor.type_name.to_owned(),
            shape: tensor.shape.to_vec(),
            bytes: tensor.bytes,
            converted_from: tensor.converted_from,
            is_left_out: false,
        };
        let made = |derived: Derived| Weight {
            bytes: derived.bytes(),
            name: derived.from,
            type_name: derived.dtype.name().to_owned(),
            shape: derived.shape.to_vec(),
            converted_from: None,
            is_left_out: false,
        };
        let is_file = |mapping: &Mapping| mapping.path().is_some();
        Self {
            derived: derived(tensors, &description.spec)
                .into_iter()
                .map(made)
                .collect(),
            in_files: tensors.mappings().iter().all(is_file),
            ..Self::new(tensors.iter().map(weight).collect(), description)
        }
    }

    /// Tensors that files of a model as described would have.
    #[must_use]
    pub fn new(mut tensors: Vec<Weight>, description: &Description) -> Self {
        for Weight {
            name, is_left_out, ..
        } in &mut tensors
        {
            *is_left_out = match description.is_ahead(name) {
                Some(is_used) => !is_used,
                None => is_outside(name),
            };
        }
        let program = Program::new(&description.spec);
        let by_name = tensors.iter().map(|tensor| (&*tensor.name, tensor));
        let by_name: HashMap<&str, &Weight> = by_name.collect();
        let contains = |name: &str| by_name.contains_key(name);
        let names = Names::new(contains, description, &program);
        let find = |name: &str| by_name.get(name).copied();
        let uses = uses(&program, &names, &find);
        let experts = expert_uses(&program, &names, &find);
        drop(names);
        Self {
            uses,
            experts,
            neurons: Vec::new(),
            tensors,
            derived: Vec::new(),
            in_files: true,
            loaded: None,
        }
    }

    /// The first use of each matrix.
    pub(super) fn matrices(&self) -> impl Iterator<Item = &WeightUse> {
        let uses = self.uses.iter().enumerate();
        let first = uses.filter(|(index, of)| {
            let mut before = self.uses[..*index].iter();
            before.all(|it| it.matrix != of.matrix)
        });
        first.map(|(_, of)| of)
    }

    /// Memory of tensors that stay in memory when weights are read, beside the matrices of [`WeightPlan::uses`] and
    /// [`WeightPlan::experts`], and those that are left to their columns: those of heads that have matrices of their own.
    pub(super) fn other_bytes(&self) -> u64 {
        let experts = self.experts.iter().flat_map(|it| &it.names);
        let of_experts: HashSet<&String> = experts.collect();
        let is_other = |tensor: &&Weight| {
            let used = self.uses.iter().any(|it| it.name == tensor.name)
                || self.neurons.iter().any(|it| it.has_tensor(&tensor.name))
                || of_experts.contains(&tensor.name);
            let elsewhere = tensor.converted_from.is_some() || tensor.is_copied();
            !used && !elsewhere && !tensor.is_left_out
        };
        let others = self.tensors.iter().filter(is_other);
        others.map(|tensor| held(tensor.bytes as u64)).sum()
    }

    /// Counts and bytes by element type, largest first.
    #[must_use]
    pub fn by_type(&self) -> Vec<TypeTotal> {
        TypeTotal::of(self.tensors.iter().map(Weight::summary))
    }

    /// Bytes of files that are weights as they are used. Where the files are mapped, they are clean pages, which
    /// the system may drop and read again.
    #[must_use]
    pub fn mapped_bytes(&self) -> u64 {
        let mapped = self
            .tensors
            .iter()
            .filter(|tensor| tensor.converted_from.is_none());
        mapped.map(|tensor| tensor.bytes as u64).sum()
    }

    /// Bytes of memory that converted matrices take, whatever they take in the file.
    #[must_use]
    pub fn converted_bytes(&self) -> u64 {
        let is_held = |tensor: &&Weight| tensor.converted_from.is_some() && !tensor.is_copied();
        let converted = self.tensors.iter().filter(is_held);
        converted.map(|tensor| tensor.bytes as u64).sum()
    }

    /// Bytes of weights, wherever they are.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes as u64).sum()
    }

    /// Bytes of those that the head which guesses tokens adds to the model's; `None` for files without one.
    #[must_use]
    pub fn head_bytes(tensors: &Tensors, description: &Description) -> Option<u64> {
        let used = |description: &Description| -> u64 {
            let weights = Self::of(tensors, description).tensors;
            let used = weights.iter().filter(|tensor| !tensor.is_left_out);
            used.map(|tensor| tensor.bytes as u64).sum()
        };
        let mut without = description.clone();
        without.spec.head = None;
        description
            .has_head()
            .then(|| used(&description.clone().with_head()) - used(&without))
    }

    /// Bytes of memory for matrices that are made of others.
    #[must_use]
    pub fn derived_bytes(&self) -> u64 {
        self.derived.iter().map(|tensor| tensor.bytes as u64).sum()
    }

    /// Bytes of the vectors copied out of it.
    #[must_use]
    pub fn copied_bytes(&self) -> u64 {
        let copied = self.tensors.iter().filter(|tensor| tensor.is_copied());
        let elements = copied.map(|tensor| tensor.shape.iter().product::<usize>());
        elements
            .map(|elements| (elements * size_of::<f32>()) as u64)
            .sum()
    }
}
