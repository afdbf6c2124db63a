//! Tensors by name: where a program's tensors are in a file.

use std::collections::{HashMap, HashSet};

use lacuna_kernels::{DType, Matrix};

use super::Linear;
use super::fetch::Fetch;
use crate::error::LoadError;
use crate::families::{Description, FUSED, Family, Spelling, heads};
use crate::layers::{PATCHES, PLACES, PROJECTION};
use crate::program::{
    Bias, ExpertsSpec, MatrixSpec, Program, TensorName, TensorSpec, VectorForm, VectorSpec,
};
use crate::spec::{HeadSpec, Latent, ModelSpec, OutputMatrix, OutputSpec, Rope, rope_table};
use lacuna_files::{Tensor, TensorError, Tensors};

/// Where tensors are looked up: a file, and how its family calls them.
pub(super) struct Source<'a> {
    tensors: &'a Tensors,
    names: Names<'a>,
    family: &'static Family,
    pub(super) spelling: Spelling,
    spec: &'a ModelSpec,
    /// What names inside a model of language begin with, in files that hold more.
    prefix: Prefix,
    /// Names that were asked for and found.
    used: HashSet<String>,
    /// How their bytes are had.
    pub(super) fetch: Fetch<'a>,
}

/// What a file calls the tensors of a program.
pub(crate) struct Names<'a> {
    contains: Box<dyn Fn(&str) -> bool + 'a>,
    description: &'a Description,
    prefix: Prefix,
    /// Rows of each of the program's matrices.
    rows: HashMap<TensorName, usize>,
}

/// How a Hugging Face file's names of the decoder differ from those of a file with nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Prefix {
    /// `model.layers`
    None,
    /// `model.language_model.layers`
    Inside,
    /// `language_model.model.layers`
    Around,
    /// `model.text_model.layers`
    Beside,
    /// `layers`
    Bare,
    /// Of parts that see, with or without a name inside of theirs and one around them:
    /// `model.vision_tower.vision_model.encoder.layers`
    Images {
        /// `vision_tower.vision_model`
        inside: bool,
        /// `model.vision_tower`
        around: bool,
    },
    /// `bert.encoder.layer`, as [`Naming::inside`](crate::families::Naming) says.
    Model(&'static str),
}

impl Prefix {
    /// That of a file with some tensors.
    fn of(contains: &dyn Fn(&str) -> bool, description: &Description) -> Self {
        let naming = &description.family.naming;
        let sees = description.spec.patches.is_some();
        let part = if sees { PATCHES } else { "token_embd" };
        let name = TensorName { layer: None, part };
        let embedding = naming.full(description.spelling, name, "weight");
        let prefixes = [
            Self::None,
            Self::Inside,
            Self::Around,
            Self::Beside,
            Self::Bare,
        ];
        let of_images = [(true, false), (false, false), (true, true), (false, true)];
        let of_images = of_images.map(|(inside, around)| Self::Images { inside, around });
        let of_images = of_images.into_iter().filter(|_| sees);
        let prefixes = prefixes.into_iter().filter(|_| !sees);
        let prefixes = prefixes
            .chain(naming.inside.map(Self::Model))
            .chain(of_images);
        let mut present = prefixes.filter(|prefix| contains(&prefix.apply(embedding.clone())));
        match description.spelling {
            Spelling::Gguf => Self::None,
            Spelling::HuggingFace => present.next().unwrap_or(Self::None),
        }
    }

    fn apply(self, name: String) -> String {
        match self {
            Self::None => name,
            Self::Inside => match name.strip_prefix("model.") {
                Some(rest) => format!("model.language_model.{rest}"),
                None => name,
            },
            Self::Around => format!("language_model.{name}"),
            Self::Beside => match name.strip_prefix("model.") {
                Some(rest) => format!("model.text_model.{rest}"),
                None => name,
            },
            Self::Bare => match name.strip_prefix("model.") {
                Some(rest) => rest.to_owned(),
                None => name,
            },
            Self::Images { inside, around } => {
                let name = match inside {
                    true => name,
                    false => name.replace("vision_tower.vision_model.", "vision_tower."),
                };
                match around {
                    true => format!("model.{name}"),
                    false => name,
                }
            }
            Self::Model(model) => match BESIDE_MODEL.iter().any(|it| name.starts_with(it)) {
                true => name,
                false => format!("{model}.{name}"),
            },
        }
    }
}

/// What the files of `tensors` call a tensor.
pub(crate) fn name_in(
    tensors: &Tensors,
    description: &Description,
    name: TensorName,
    suffix: &str,
) -> String {
    let full = description.tensor_name(name, suffix);
    match of_head(description, name, (&full, suffix)) {
        Some(own) => own,
        None => Prefix::of(&|name| tensors.contains(name), description).apply(full),
    }
}

/// What a folder calls a tensor of the head that guesses tokens, where it is not numbered on behind the layers and
/// would be called `full` if it were.
fn of_head(
    description: &Description,
    name: TensorName,
    (full, suffix): (&str, &str),
) -> Option<String> {
    let naming = &description.family.naming;
    let number = description.spec.layers.len();
    let head = description.spec.head.as_ref();
    if head.is_some_and(HeadSpec::is_beside) && name.layer >= Some(number) {
        return Some(heads::full(name, number, suffix));
    }
    let (Some(head), Spelling::HuggingFace) = (naming.head, description.spelling) else {
        return None;
    };
    let ahead = name.layer?.checked_sub(number)?;
    let (_, part) = full
        .strip_prefix(naming.layers)?
        .strip_prefix('.')?
        .split_once('.')?;
    Some(match name.part.starts_with(HEAD) {
        true => format!("{head}.{part}"),
        false => format!("{head}.layers.{ahead}.{part}"),
    })
}

/// What the names of parts of a head begin with that layers do not have.
const HEAD: &str = "nextn.";

/// The part that makes scores of a pooled row.
const SCORES: &str = "cls.output";

/// What the names of a classifier begin with, which lies beside the model that it judges the output of.
const BESIDE_MODEL: [&str; 2] = ["classifier.", "head."];

/// What names of the parts that see and hear, or foretell more than one token, begin with, in files that
/// hold them beside a model of language.
const OUTSIDE: [&str; 9] = [
    "mtp.",
    "visual.",
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "connector.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
];

/// Whether a tensor of this name belongs to something other than the model of language.
pub(crate) fn is_outside(name: &str) -> bool {
    let name = name.strip_prefix("model.").unwrap_or(name);
    OUTSIDE.iter().any(|outside| name.starts_with(outside))
}

/// Whether a tensor of this name belongs to what makes rows of images.
pub(crate) fn is_of_images(name: &str) -> bool {
    let name = name.strip_prefix("model.").unwrap_or(name);
    let parts = [
        "vision_tower.",
        "vision_model.",
        "multi_modal_projector.",
        "connector.",
        "visual.",
        "embed_vision.",
    ];
    parts.iter().any(|part| name.starts_with(part))
}

/// What names begin with of parts that hear, in GGUF files that have them beside those that see.
const SOUNDS: [&str; 2] = ["a.", "mm.a."];

/// What names have in them of the part that makes one row of an image, which decoders do not read.
const IMAGE_HEADS: [&str; 2] = ["vision_tower.head.", "vision_tower.vision_model.head."];

/// Where matrices of experts are: a tensor's name, the first of an expert's rows there, and how many of
/// its rows are that expert's.
pub(super) struct Stack {
    pub(super) name: String,
    first: usize,
    pub(super) each: usize,
}

/// Where a tensor is: the tensor, and the first of its rows.
struct Found {
    tensor: Tensor,
    first: usize,
}

impl<'a> Names<'a> {
    /// Those of a file with the tensors that `contains` says, for `program`.
    pub(crate) fn new(
        contains: impl Fn(&str) -> bool + 'a,
        description: &'a Description,
        program: &Program,
    ) -> Self {
        let rows = program.tensors().iter().filter_map(|tensor| match tensor {
            TensorSpec::Matrix(matrix) => Some((matrix.name, matrix.rows)),
            TensorSpec::Experts(_) | TensorSpec::Vector(_) => None,
        });
        Self {
            rows: rows.collect(),
            prefix: Prefix::of(&contains, description),
            description,
            contains: Box::new(contains),
        }
    }

    /// The name of a tensor of its own.
    pub(crate) fn full(&self, name: TensorName, suffix: &str) -> String {
        self.placed(name, (self.description.tensor_name(name, suffix), suffix))
    }

    /// The name of a tensor that would be called `full` in a file with nothing else.
    fn placed(&self, name: TensorName, (full, suffix): (String, &str)) -> String {
        let of_head = of_head(self.description, name, (&full, suffix));
        of_head.unwrap_or_else(|| self.prefix.apply(full))
    }

    /// The tensor that holds the rows of `name` among others, if the file has it: its name, the first
    /// of the rows, and how many rows it has.
    pub(crate) fn fused(&self, name: TensorName, suffix: &str) -> Option<(String, usize, usize)> {
        let (whole, parts) = FUSED.iter().find(|(_, parts)| parts.contains(&name.part))?;
        let part = match (self.description.spelling, *whole) {
            (Spelling::Gguf, "ffn_gate_up") => "ffn_up",
            (_, whole) => whole,
        };
        let full = self.full(TensorName { part, ..name }, suffix);
        if !(self.contains)(&full) {
            return None;
        }
        // A name that is both a part's and the whole's is the whole's when the others are missing.
        let first_part = TensorName {
            part: parts[0],
            ..name
        };
        if parts.contains(&part) && (self.contains)(&self.full(first_part, suffix)) {
            return None;
        }
        let rows = |part: &&'static str| self.rows(TensorName { part, ..name });
        let before = parts.iter().take_while(|part| **part != name.part);
        Some((full, before.map(rows).sum(), parts.iter().map(rows).sum()))
    }

    /// The tensor that has `rows` rows of each expert for `name`, alone or among those of its fused
    /// other half, if the file has one.
    pub(super) fn stack(&self, name: TensorName, suffix: &str, rows: usize) -> Option<Stack> {
        let half = ["ffn_gate_exps", "ffn_up_exps"]
            .iter()
            .position(|part| *part == name.part);
        let whole = half.map(|half| {
            let part = "ffn_gate_up_exps";
            (TensorName { part, ..name }, half * rows, 2 * rows)
        });
        let alone = Some((name, 0, rows));
        let ways = [whole, alone].into_iter().flatten();
        let mut found = ways.filter_map(|(name, first, each)| {
            let Description {
                family, spelling, ..
            } = self.description;
            let full = family.naming.of_stack(*spelling, name, suffix);
            let mut names = full
                .into_iter()
                .map(|full| self.placed(name, (full, suffix)));
            let name = names.find(|name| (self.contains)(name))?;
            Some(Stack { name, first, each })
        });
        found.next()
    }

    /// The name of one expert's own matrix.
    pub(super) fn of_expert(&self, name: TensorName, expert: usize) -> String {
        let Description {
            family, spelling, ..
        } = self.description;
        let full = family.naming.of_expert(*spelling, name, expert);
        self.placed(name, (full, "weight"))
    }

    /// Rows that the program has a matrix for; none where it has no such matrix.
    fn rows(&self, name: TensorName) -> usize {
        self.rows.get(&name).copied().unwrap_or(0)
    }
}

impl<'a> Source<'a> {
    pub(super) fn new(
        tensors: &'a Tensors,
        description: &'a Description,
        program: &Program,
        fetch: Fetch<'a>,
    ) -> Self {
        let names = Names::new(|name| tensors.contains(name), description, program);
        Self {
            tensors,
            family: description.family,
            spelling: description.spelling,
            spec: &description.spec,
            prefix: names.prefix,
            names,
            used: HashSet::new(),
            fetch,
        }
    }

    fn full(&self, name: TensorName, suffix: &str) -> String {
        self.names.full(name, suffix)
    }

    fn fused(&self, name: TensorName, suffix: &str) -> Option<(String, usize, usize)> {
        self.names.fused(name, suffix)
    }

    /// A matrix, with its bias where the family or the file has one.
    ///
    /// `number` is the matrix's among the program's tensors.
    pub(super) fn matrix(&mut self, number: usize, spec: &MatrixSpec) -> Result<Linear, LoadError> {
        let MatrixSpec {
            name,
            rows,
            columns,
            bias,
        } = *spec;
        if let Some(answers) = self.answers(name, rows, columns)? {
            return Linear::new(answers, 0, rows, columns, None);
        }
        if name.part == PROJECTION {
            let turned = self.turned_matrix(name, rows, columns)?;
            return Linear::new(turned, 0, rows, columns, None);
        }
        let Found { tensor, first } = self.find(name, "weight", rows, Some(columns))?;
        let bias = match bias {
            Bias::Required => true,
            Bias::IfPresent => self.has(name, "bias"),
        };
        let bias = bias
            .then(|| self.floats(name, "bias", (rows, VectorForm::Plain)))
            .transpose()?;
        let rows_in_file = first..first + rows;
        match self.fetch.rows(number, &tensor, rows_in_file, columns)? {
            Some(read) => Linear::new(read, 0, rows, columns, bias),
            None => Linear::new(tensor, first, rows, columns, bias),
        }
    }

    /// A matrix that files have the other way round, `[columns, rows]`, as `f32`.
    fn turned_matrix(
        &mut self,
        name: TensorName,
        rows: usize,
        columns: usize,
    ) -> Result<Tensor, LoadError> {
        let stored = self.whole(name, &[columns, rows])?;
        let stored = self.fetch.whole(stored)?;
        let matrix = Matrix::new(stored.dtype(), columns, rows, stored.bytes());
        let matrix = matrix.map_err(|source| LoadError::Tensor {
            name: stored.name().to_owned(),
            source,
        })?;
        let (mut row, mut values) = (vec![0.0f32; rows], vec![0.0f32; rows * columns]);
        for column in 0..columns {
            matrix.dequantize_row(column, &mut row);
            let places = values.iter_mut().skip(column).step_by(columns);
            places.zip(&row).for_each(|(place, value)| *place = *value);
        }
        let bytes = bytemuck::cast_slice(&values).to_vec();
        let shape = [rows, columns];
        Ok(Tensor::in_memory(PROJECTION, DType::F32, &shape, bytes))
    }

    /// The scores of a model that answers in tokens: their rows of the output matrix.
    fn answers(
        &mut self,
        name: TensorName,
        rows: usize,
        columns: usize,
    ) -> Result<Option<Tensor>, LoadError> {
        let answers = self.spec.pooled().and_then(|pooled| pooled.answers);
        let Some(tokens) = answers.filter(|_| name.part == SCORES) else {
            return Ok(None);
        };
        let parts = ["output", "token_embd"].map(|part| TensorName { layer: None, part });
        let [own, embedding] = parts;
        let output = if self.has(own, "weight") {
            own
        } else {
            embedding
        };
        let vocabulary = self.spec.vocabulary;
        let table = self.whole(output, &[vocabulary, columns])?;
        let table = self.fetch.whole(table)?;
        let matrix = Matrix::new(table.dtype(), vocabulary, columns, table.bytes());
        let matrix = matrix.map_err(|source| LoadError::Tensor {
            name: table.name().to_owned(),
            source,
        })?;
        let mut values = vec![0.0f32; rows * columns];
        for (row, token) in values.chunks_exact_mut(columns).zip(tokens) {
            matrix.dequantize_row(token, row);
        }
        let bytes = bytemuck::cast_slice(&values).to_vec();
        let shape = [rows, columns];
        Ok(Some(Tensor::in_memory(SCORES, DType::F32, &shape, bytes)))
    }

    /// The matrices of a layer's experts: rows of one tensor that has them all, or a tensor each.
    ///
    /// `number` is theirs among the program's tensors.
    pub(super) fn experts(
        &mut self,
        number: usize,
        spec: &ExpertsSpec,
    ) -> Result<Vec<Linear>, LoadError> {
        let ExpertsSpec {
            name,
            experts,
            rows,
            columns,
            bias,
            ..
        } = *spec;
        if let Some(heads) = self.heads(spec)? {
            return Ok(heads);
        }
        let biases = self.expert_biases(name, [experts, rows], bias)?;
        let bias = |expert: usize| {
            let biases = biases.as_ref();
            biases.map(|biases| biases[expert * rows..][..rows].to_vec())
        };
        if let Some(Stack { name, first, each }) = self.names.stack(name, "weight", rows) {
            let tensor = self
                .tensors
                .require_shape(&name, &[experts, each, columns])?;
            let tensor = match self.fetch.is_elsewhere(number) {
                true => tensor,
                // Gate and up may be halves of one.
                false => self.fetch.shared(tensor)?,
            };
            self.used.insert(name);
            let linear = |expert| {
                let first = expert * each + first;
                Linear::new(tensor.clone(), first, rows, columns, bias(expert))
            };
            return (0..experts).map(linear).collect();
        }
        let linear = |expert| {
            let name = self.names.of_expert(name, expert);
            let mut tensor = self.tensors.require_shape(&name, &[rows, columns])?;
            if !self.fetch.is_elsewhere(number) {
                tensor = self.fetch.whole(tensor)?;
            }
            self.used.insert(name);
            Linear::new(tensor, 0, rows, columns, bias(expert))
        };
        (0..experts).map(linear).collect()
    }

    /// Biases of all experts, one after another, where the family or the file has some.
    fn expert_biases(
        &mut self,
        name: TensorName,
        [experts, rows]: [usize; 2],
        bias: Bias,
    ) -> Result<Option<Vec<f32>>, LoadError> {
        let stack = match (self.names.stack(name, "bias", rows), bias) {
            (Some(stack), _) => stack,
            (None, Bias::IfPresent) => return Ok(None),
            (None, Bias::Required) => Stack {
                name: self.full(name, "bias"),
                first: 0,
                each: rows,
            },
        };
        let tensor = self
            .tensors
            .require_shape(&stack.name, &[experts, stack.each])?;
        let tensor = self.fetch.whole(tensor)?;
        let wrong = |source| LoadError::Tensor {
            name: stack.name.clone(),
            source,
        };
        let matrix = Matrix::new(tensor.dtype(), experts, stack.each, tensor.bytes());
        let matrix = matrix.map_err(wrong)?;
        let (mut row, mut biases) = (vec![0.0; stack.each], Vec::new());
        for expert in 0..experts {
            matrix.dequantize_row(expert, &mut row);
            biases.extend(&row[stack.first..][..rows]);
        }
        self.used.insert(stack.name);
        Ok(Some(biases))
    }

    /// A vector, as `f32`.
    pub(super) fn vector(&mut self, spec: &VectorSpec) -> Result<Vec<f32>, LoadError> {
        let VectorSpec {
            name,
            suffix,
            width,
            form,
        } = *spec;
        let mut values = self.floats(name, suffix, (width, form))?;
        let huggingface = self.spelling == Spelling::HuggingFace;
        match form {
            VectorForm::Plain => {
                let offset = self.family.naming.norm_offset;
                // Norms of states are stored whole.
                let is_norm = name.part.ends_with("norm") && !name.part.starts_with("ssm");
                // A head's are as its own family has them.
                let is_norm = is_norm && !self.full(name, suffix).starts_with(heads::PREFIX);
                // What is added is no weight.
                let is_norm = is_norm && suffix != "bias";
                if huggingface && offset != 0.0 && is_norm {
                    values.iter_mut().for_each(|value| *value += offset);
                }
                return Ok(values);
            }
            VectorForm::LessOne => {
                if huggingface {
                    values.iter_mut().for_each(|value| *value += 1.0);
                }
                return Ok(values);
            }
            VectorForm::Rows(_) => return Ok(values),
            VectorForm::Taps(taps) => return Ok(turned(&values, taps)),
            VectorForm::Finite => {}
            VectorForm::Rates if huggingface => {
                values.iter_mut().for_each(|value| *value = -value.exp());
            }
            VectorForm::Rates => {}
        }
        let wrong =
            |value: &&f32| !value.is_finite() || (form == VectorForm::Rates && **value > 0.0);
        match values.iter().find(wrong) {
            None => Ok(values),
            Some(value) => Err(LoadError::StateParameter {
                name: self.full(name, suffix),
                value: *value,
            }),
        }
    }

    /// Divisors of the frequencies of `rope`, where it may have some in the file; of a head's, which is number `layer` of the
    /// layers.
    pub(super) fn rope_factors(
        &mut self,
        (rope, layer): (&Rope, Option<usize>),
        part: &'static str,
        pairs: usize,
    ) -> Result<Option<Vec<f32>>, LoadError> {
        let name = TensorName { layer, part };
        let wanted = rope.file_factors && (self.spelling == Spelling::Gguf || layer.is_some());
        match wanted && self.tensors.contains(&self.full(name, "weight")) {
            true => self
                .floats(name, "weight", (pairs, VectorForm::Plain))
                .map(Some),
            false => Ok(None),
        }
    }

    /// Divisors of frequencies that must be there and be positive.
    pub(super) fn required_rope_factors(
        &mut self,
        layer: Option<usize>,
        part: &'static str,
        pairs: usize,
    ) -> Result<Vec<f32>, LoadError> {
        let factors = self.floats(
            TensorName { layer, part },
            "weight",
            (pairs, VectorForm::Plain),
        )?;
        rope_table(&factors, pairs)?;
        Ok(factors)
    }

    /// The latent rows of a layer, if it has some.
    pub(super) fn latent(&self, layer: usize) -> Option<Latent> {
        self.spec.layer(layer)?.attention.as_ref()?.latent
    }

    /// The tensor of a name, all of it.
    pub(super) fn whole(
        &mut self,
        name: TensorName,
        shape: &[usize],
    ) -> Result<Tensor, TensorError> {
        let full = self.full(name, "weight");
        let tensor = self.tensors.require_shape(&full, shape)?;
        self.used.insert(full);
        Ok(tensor)
    }

    pub(super) fn has(&self, name: TensorName, suffix: &str) -> bool {
        let own = self.tensors.contains(&self.full(name, suffix));
        own || self.fused(name, suffix).is_some()
    }

    /// The tensor of a name, or that which has its rows among others.
    fn find(
        &mut self,
        name: TensorName,
        suffix: &str,
        rows: usize,
        columns: Option<usize>,
    ) -> Result<Found, TensorError> {
        let (full, first, all_rows) = match self.fused(name, suffix) {
            Some(fused) => fused,
            None => (self.full(name, suffix), 0, rows),
        };
        let shape: Vec<usize> = [Some(all_rows), columns].into_iter().flatten().collect();
        // Matrices of a size may lie in a dimension of their own.
        let stack: Vec<usize> = [all_rows / rows, rows].into_iter().chain(columns).collect();
        let tensor = match (all_rows > rows, self.tensors.get(&full)?) {
            (true, Some(tensor)) if tensor.shape() == stack => tensor,
            // A matrix of one row may be without the dimension that counts them.
            (false, Some(tensor))
                if rows == 1 && columns.is_some() && tensor.shape() == &shape[1..] =>
            {
                tensor
            }
            // A convolution's has one for channels and two for the places of a patch.
            (false, Some(tensor))
                if columns.is_some() && is_convolution(tensor.shape(), &shape) =>
            {
                tensor
            }
            // What is learned of columns and of rows are two tables.
            (false, Some(tensor))
                if name.part == PLACES
                    && is_tables(tensor.shape(), [rows, columns.unwrap_or(0)]) =>
            {
                tensor
            }
            // A number alone may be without dimensions.
            (false, Some(tensor)) if shape == [1] && tensor.shape().is_empty() => tensor,
            // And a vector may have one.
            (false, Some(tensor)) if columns.is_none() && tensor.shape() == [1, rows] => tensor,
            _ => self.tensors.require_shape(&full, &shape)?,
        };
        self.used.insert(full);
        Ok(Found { tensor, first })
    }

    fn floats(
        &mut self,
        name: TensorName,
        suffix: &str,
        (width, form): (usize, VectorForm),
    ) -> Result<Vec<f32>, LoadError> {
        let Found { tensor, first } = match self.in_form(name, suffix, (width, form))? {
            Some(tensor) => Found { tensor, first: 0 },
            None => self.find(name, suffix, width, None)?,
        };
        let tensor = self.fetch.whole(tensor)?;
        let whole = tensor.shape().iter().product();
        let row = Matrix::new(tensor.dtype(), 1, whole, tensor.bytes()).map_err(|source| {
            LoadError::Tensor {
                name: tensor.name().to_owned(),
                source,
            }
        })?;
        let mut values = vec![0.0; whole];
        row.dequantize_row(0, &mut values);
        values.truncate(first + width);
        values.drain(..first);
        Ok(values)
    }

    /// The tensor of a vector that files have as a matrix, if the file has it so.
    fn in_form(
        &mut self,
        name: TensorName,
        suffix: &str,
        (width, form): (usize, VectorForm),
    ) -> Result<Option<Tensor>, TensorError> {
        let columns = match form {
            VectorForm::Plain | VectorForm::LessOne => return Ok(None),
            VectorForm::Taps(columns) | VectorForm::Rows(columns) => columns,
            VectorForm::Finite | VectorForm::Rates => 1,
        };
        let full = self.full(name, suffix);
        let Some(tensor) = self.tensors.get(&full)? else {
            return Ok(None);
        };
        let rows = width / columns;
        let fits = match *tensor.shape() {
            [found, row] => [found, row] == [rows, columns],
            // What each of the channels of a convolution has of one other.
            [found, 1, row] => [found, row] == [rows, columns],
            _ => false,
        };
        if fits {
            self.used.insert(full);
        }
        Ok(fits.then_some(tensor))
    }

    /// The names of tensors that hold once more what a file has apart: keys and values of heads of latent
    /// attention.
    fn twice(&self) -> HashSet<String> {
        let layers = self.spec.layers.iter().enumerate();
        let latent = layers.filter(|(_, layer)| {
            layer
                .attention
                .as_ref()
                .is_some_and(|it| it.latent.is_some())
        });
        let names = latent.map(|(layer, _)| TensorName {
            layer: Some(layer),
            part: "attn_kv_b",
        });
        names.map(|name| self.full(name, "weight")).collect()
    }

    /// The names that tensors for keys and values have of layers that read an earlier layer's: such
    /// layers may have been trained with their own before they were made to share, and files keep those.
    fn idle(&self, spec: &ModelSpec) -> HashSet<String> {
        let layers = spec.layers.iter().enumerate();
        let sharing = layers.filter(|(_, layer)| {
            layer
                .attention
                .as_ref()
                .is_some_and(|it| it.shares.is_some())
        });
        let names = sharing.flat_map(|(layer, _)| {
            ["attn_k", "attn_v", "attn_k_norm"].map(|part| TensorName {
                layer: Some(layer),
                part,
            })
        });
        let both = names.flat_map(|name| ["weight", "bias"].map(|suffix| self.full(name, suffix)));
        both.collect()
    }

    /// What names of tensors begin with of layers that foretell more than one token.
    fn ahead(&self, spec: &ModelSpec) -> Vec<String> {
        let first = spec.layers.len();
        let layers = first..first + spec.layers_ahead;
        let names = layers.map(|layer| {
            let name = match self.spelling {
                Spelling::Gguf => format!("blk.{layer}."),
                Spelling::HuggingFace => format!("model.layers.{layer}."),
            };
            self.prefix.apply(name)
        });
        names.chain([heads::PREFIX.to_owned()]).collect()
    }

    /// Whether a tensor is a norm's bias of zeros, which files of norms that have none may hold.
    fn adds_nothing(&self, name: &str) -> bool {
        let bias = name.ends_with("norm.bias").then(|| self.tensors.get(name));
        let Some(Ok(Some(bias))) = bias else {
            return false;
        };
        bias.bytes().iter().all(|byte| *byte == 0)
    }

    /// Refuses tensors that nothing asked for: what they are for would be missing from the results.
    pub(super) fn refuse_surplus(&self, spec: &ModelSpec) -> Result<(), LoadError> {
        // Files of models that pool may have an output matrix all the same.
        let tied = match &spec.output {
            OutputSpec::Logits(logits) => logits.matrix == OutputMatrix::Tied,
            OutputSpec::Pooled(_) | OutputSpec::Image(_) => true,
        };
        let is_outside = |name: &str| match (&spec.output, self.spelling) {
            // A file for images may have what is for sounds too.
            (OutputSpec::Image(_), Spelling::Gguf) => {
                SOUNDS.iter().any(|part| name.starts_with(part))
            }
            // Of what is outside of the model of language, this is the part that sees.
            (OutputSpec::Image(_), Spelling::HuggingFace) => {
                !is_of_images(name) || IMAGE_HEADS.iter().any(|head| name.contains(head))
            }
            _ => is_outside(name),
        };
        let mut idle = self.idle(spec);
        idle.extend(self.twice());
        let ahead = self.ahead(spec);
        let unused_names = self.family.naming.unused.iter();
        let unused_names = unused_names.map(|name| self.prefix.apply((*name).to_owned()));
        let unused_names: Vec<String> = unused_names.collect();
        let surplus = self.tensors.iter().map(|tensor| tensor.name).find(|name| {
            let unused = !self.used.contains(*name)
                && !is_outside(name)
                && !unused_names.iter().any(|unused| unused == name);
            let is_ahead = ahead.iter().any(|block| name.starts_with(block.as_str()));
            unused
                && !is_ahead
                && !is_redundant(name, tied)
                && !idle.contains(*name)
                && !self.adds_nothing(name)
        });
        match surplus {
            None => Ok(()),
            Some(name) => Err(LoadError::SurplusTensor {
                name: name.to_owned(),
                family: self.family.name,
            }),
        }
    }
}

/// Whether a tensor of four dimensions, or five if it has frames, has the rows of a matrix.
fn is_convolution(found: &[usize], matrix: &[usize]) -> bool {
    match (found, matrix) {
        ([found, channels @ ..], [rows, columns]) if matches!(channels.len(), 3 | 4) => {
            let all = channels
                .iter()
                .try_fold(1usize, |all, size| all.checked_mul(*size));
            found == rows && all == Some(*columns)
        }
        _ => false,
    }
}

/// Whether a tensor of three dimensions has the rows of a matrix in two tables of as many.
fn is_tables(found: &[usize], [rows, columns]: [usize; 2]) -> bool {
    matches!(found, [2, each, width] if each.checked_mul(2) == Some(rows) && *width == columns)
}

/// Rows of `columns` elements as so many rows.
fn turned(values: &[f32], columns: usize) -> Vec<f32> {
    let column = |at| values.iter().skip(at).step_by(columns);
    (0..columns).flat_map(column).copied().collect()
}

/// Whether a tensor says what the description says already: older files hold rotation frequencies, and
/// some a copy of the embedding table as the output matrix.
fn is_redundant(name: &str, tied: bool) -> bool {
    name.ends_with("rotary_emb.inv_freq")
        || name.ends_with("attn_rot_embd.weight")
        || (tied && (name.ends_with("lm_head.weight") || name == "output.weight"))
}
