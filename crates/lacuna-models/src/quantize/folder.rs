//! Hugging Face folders, as GGUF files hold them.
//!
//! What a family asks its `config.json` for is what GGUF metadata says, under GGUF's names; rotations and norms
//! are written from the model's description, and tensors are those that a forward pass is computed with. What
//! comes of it is read back: only if GGUF describes the same model is it written.

use std::path::Path;

use lacuna_files::gguf;
use lacuna_files::huggingface::Folder;
use lacuna_files::{DType, Mapping, Tensor, Tensors};
use lacuna_kernels::{Matrix, RopeStyle};
use lacuna_text::tokenizer::Vocabulary;

use super::input::Input;
use super::{Error, Item};
use crate::error::ConfigError;
use crate::families::{Description, Found, GivenFact, Spelling};
use crate::program::{MatrixSpec, Program, TensorName, TensorSpec, VectorSpec};
use crate::spec::{LayerSpec, ModelSpec, NormKind, Pooling, Rope, RopeScaling, Yarn};
use crate::weights::{Weights, name_in};

/// What a folder becomes.
pub(super) struct Converted {
    pub(super) header: gguf::Writer,
    pub(super) metadata: gguf::Metadata,
    pub(super) items: Vec<Item>,
}

/// Looks at all that a folder says, and at its weights one tensor after another.
pub(super) fn convert(folder: &Folder, tensors: &Tensors) -> Result<Converted, Error> {
    let (description, found) = Description::with_facts(folder)?;
    let program = Program::new(&description.spec);
    let unsupported = || Error::Family {
        family: description.family.name,
    };
    let mut layers = description.spec.layers.iter();
    // GGUF has the tensors of states in forms and orders of its own.
    if has_sections(folder) || layers.any(|layer| layer.recurrence.is_some()) {
        return Err(unsupported());
    }
    // Whether each of the program's tensors is there, and no others are.
    Weights::check(tensors, &description, &program)?;
    let mut header = gguf::Writer::new();
    describe(&mut header, folder.path(), &description, &found);
    let (family, rows) = (description.family.name, description.spec.vocabulary);
    let vocabulary = Vocabulary::from_folder(folder.path(), family, rows)?;
    write_vocabulary(&mut header, &vocabulary);

    let mut items = Vec::new();
    let reader = Reader {
        tensors,
        description: &description,
    };
    for tensor in program.tensors() {
        match tensor {
            TensorSpec::Matrix(matrix) => reader.matrix(matrix, &mut items)?,
            TensorSpec::Vector(vector) => items.push(reader.vector(vector)?),
            TensorSpec::Experts(_) => return Err(unsupported()),
        }
    }
    items.extend(rope_factors(&description.spec.ropes));
    let metadata = gguf::File::parse(Mapping::from(header.to_bytes()))?;
    let metadata = metadata.metadata().clone();
    // Or it is not described at all.
    let read_back = read_back(&metadata, &items, &description).map_err(|_| unsupported())?;
    if written(read_back.spec.clone()) != written(description.spec.clone()) {
        return Err(unsupported());
    }
    if neighbours(&read_back.spec) && !neighbours(&description.spec) {
        let layers = &description.spec.layers;
        items.iter_mut().for_each(|item| permute(item, layers));
    }
    Ok(Converted {
        header,
        metadata,
        items,
    })
}

/// What GGUF files say of a model besides its vocabulary.
fn describe(header: &mut gguf::Writer, path: &Path, description: &Description, found: &Found) {
    let family = description.family.name;
    header
        .set("general.architecture", family)
        .set("general.type", "model");
    if let Some(name) = path.file_name().and_then(|name| name.to_str()) {
        header.set("general.name", name);
    }
    // Folders call either by names of the other.
    let epsilons = [
        "attention.layer_norm_rms_epsilon",
        "attention.layer_norm_epsilon",
    ];
    let said = found.iter().filter(|(name, _)| !epsilons.contains(name));
    for (name, given) in said {
        set(header, &format!("{family}.{name}"), given);
    }
    let key = |name: &str| format!("{family}.{name}");
    let norm = description.spec.norm;
    let of_kind = epsilons[usize::from(norm.kind != NormKind::Rms)];
    header.set(&key(of_kind), norm.epsilon);
    if let Some(length) = found.get("attention.key_length") {
        set(header, &key("attention.value_length"), length);
    }
    header.set(&key("vocab_size"), description.spec.vocabulary as u32);
    if let Some(pooled) = description.spec.pooled() {
        // What else becomes of the rows there is no key for: such a file is read back as another model.
        let pooling: u32 = match pooled.pooling {
            Pooling::Mean => 1,
            Pooling::First => 2,
            Pooling::Last => 3,
        };
        header.set(&key("pooling_type"), pooling).set(
            &key("context_length"),
            description.spec.context_tokens as u32,
        );
    }
    let mut ropes = description.spec.ropes.iter();
    if let Some(rope) = ropes.next() {
        describe_rope(header, &key, rope);
    }
    if let Some(windowed) = ropes.next() {
        header.set(&key("rope.freq_base_swa"), windowed.theta as f32);
    }
}

fn set(header: &mut gguf::Writer, key: &str, given: &GivenFact) {
    match given {
        GivenFact::Size(size) => header.set(key, *size),
        GivenFact::Sizes(sizes) => header.set(key, &sizes[..]),
        GivenFact::Number(number) => header.set(key, *number),
        GivenFact::Flag(flag) => header.set(key, *flag),
        GivenFact::Text(text) => header.set(key, &text[..]),
    };
}

fn describe_rope(header: &mut gguf::Writer, key: &impl Fn(&str) -> String, rope: &Rope) {
    header
        .set(&key("rope.freq_base"), rope.theta as f32)
        .set(&key("rope.dimension_count"), rope.dimensions as u32);
    let mut scaling = |kind: &str, factor: f64| {
        header
            .set(&key("rope.scaling.type"), kind)
            .set(&key("rope.scaling.factor"), factor as f32);
    };
    match &rope.scaling {
        RopeScaling::Linear { factor } => scaling("linear", *factor),
        RopeScaling::Yarn(yarn) => {
            scaling("yarn", yarn.factor);
            let times_usual = yarn.attention_factor / Yarn::usual_attention_factor(yarn.factor);
            header
                .set(
                    &key("rope.scaling.original_context_length"),
                    yarn.original_context as u32,
                )
                .set(&key("rope.scaling.yarn_beta_fast"), yarn.beta_fast as f32)
                .set(&key("rope.scaling.yarn_beta_slow"), yarn.beta_slow as f32)
                .set(&key("rope.scaling.attn_factor"), times_usual as f32);
        }
        // Llama 3's is a tensor; of the others, what is read back is not the same.
        _ => {}
    }
}

/// Divisors of frequencies, which GGUF files have where Llama 3's parameters say how to make them.
fn rope_factors(ropes: &[Rope]) -> Option<Item> {
    let rope = ropes.first()?;
    let RopeScaling::Llama3 { .. } = rope.scaling else {
        return None;
    };
    let plain = Rope {
        scaling: RopeScaling::None,
        ..rope.clone()
    };
    let frequencies = plain.inverse_frequencies();
    let pairs = frequencies.iter().zip(rope.inverse_frequencies());
    let factors = pairs.map(|(plain, scaled)| plain / scaled).collect();
    Some(of_values("rope_freqs.weight".to_owned(), factors))
}

/// A vector that is written as it is here.
fn of_values(name: String, values: Vec<f32>) -> Item {
    let shape = vec![values.len()];
    let bytes = values.iter().flat_map(|value| value.to_le_bytes());
    let tensor = Tensor::in_memory(&name, DType::F32, &shape, bytes.collect());
    Item {
        name,
        shape,
        dtype: DType::F32,
        input: Input::in_memory(tensor),
    }
}

fn write_vocabulary(header: &mut gguf::Writer, vocabulary: &Vocabulary) {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    header
        .set(&key("model"), vocabulary.model)
        .set(&key("pre"), vocabulary.pre)
        .set(&key("tokens"), &vocabulary.tokens[..])
        .set(&key("token_type"), &vocabulary.token_types[..]);
    if let Some(merges) = &vocabulary.merges {
        header.set(&key("merges"), &merges[..]);
    }
    if let Some(scores) = &vocabulary.scores {
        header.set(&key("scores"), &scores[..]);
    }
    let ids = [
        ("bos_token_id", vocabulary.bos),
        ("eos_token_id", vocabulary.eos),
        ("unknown_token_id", vocabulary.unknown),
        ("padding_token_id", vocabulary.padding),
    ];
    for (name, id) in ids {
        if let Some(id) = id {
            header.set(&key(name), id);
        }
    }
    header
        .set(&key("add_bos_token"), vocabulary.add_bos)
        .set(&key("add_eos_token"), vocabulary.add_eos);
    if let Some(add) = vocabulary.add_space_prefix {
        header.set(&key("add_space_prefix"), add);
    }
    if let Some(template) = &vocabulary.chat_template {
        header.set("tokenizer.chat_template", &template[..]);
    }
}

fn read_back(
    metadata: &gguf::Metadata,
    items: &[Item],
    description: &Description,
) -> Result<Description, ConfigError> {
    let rows_of = |name: &str| {
        let item = items.iter().find(|item| item.name == name)?;
        item.shape.first().copied()
    };
    let vocabulary = description.spec.vocabulary;
    Description::from_gguf(metadata, vocabulary, &rows_of)
}

/// A model without what the two kinds of files say in different places: which elements of heads turn
/// together is in the order of rows, and Llama 3's frequencies are a tensor.
fn written(mut spec: ModelSpec) -> ModelSpec {
    for rope in &mut spec.ropes {
        rope.style = RopeStyle::HalfSplit;
        rope.file_factors = true;
        if let RopeScaling::Llama3 { .. } = rope.scaling {
            rope.scaling = RopeScaling::None;
        }
    }
    spec
}

/// Whether neighbouring elements of heads turn together, not those of two halves.
fn neighbours(spec: &ModelSpec) -> bool {
    let mut ropes = spec.ropes.iter();
    ropes.any(|rope| rope.style == RopeStyle::Interleaved)
}

/// Puts the rows of queries and keys in the order in which elements that turn together are neighbours, in
/// layers too whose heads do not turn: converters make no difference.
fn permute(item: &mut Item, layers: &[LayerSpec]) {
    let (Some(layer), "attn_q" | "attn_k", _) = super::parts(&item.name) else {
        return;
    };
    let layer = layers.get(layer);
    if let Some(attention) = layer.and_then(|layer| layer.attention.as_ref()) {
        item.input.interleave(attention.head_dim);
    }
}

/// Whether positions have several numbers, as in models that see: GGUF has a list of its own for them.
fn has_sections(folder: &Folder) -> bool {
    let fields = ["rope_parameters", "rope_scaling"];
    let mut maps = fields
        .iter()
        .filter_map(|field| folder.config().map().get(*field));
    maps.any(|map| map.get("mrope_section").is_some())
}

/// Tensors of a folder.
struct Reader<'a> {
    tensors: &'a Tensors,
    description: &'a Description,
}

impl Reader<'_> {
    fn names(&self, name: TensorName, suffix: &str) -> [String; 2] {
        let naming = &self.description.family.naming;
        [
            name_in(self.tensors, self.description, name, suffix),
            naming.full(Spelling::Gguf, name, suffix),
        ]
    }

    fn matrix(&self, spec: &MatrixSpec, items: &mut Vec<Item>) -> Result<(), Error> {
        let [own, name] = self.names(spec.name, "weight");
        // Where it is not a tensor of its own, GGUF files do not agree on what it is part of.
        if !self.tensors.contains(&own) {
            return Err(Error::Family {
                family: self.description.family.name,
            });
        }
        items.push(Item {
            name,
            shape: vec![spec.rows, spec.columns],
            dtype: DType::F32,
            input: Input::of_files(self.tensors, &own)?,
        });
        let [own, name] = self.names(spec.name, "bias");
        if let Some(bias) = self.tensors.get(&own)? {
            items.push(of_values(name, values(&bias)));
        }
        Ok(())
    }

    fn vector(&self, spec: &VectorSpec) -> Result<Item, Error> {
        let [own, name] = self.names(spec.name, spec.suffix);
        let tensor = self.tensors.require(&own)?;
        let mut values = values(&tensor);
        if spec.name.part.ends_with("norm") && spec.suffix != "bias" {
            let offset = self.description.family.naming.norm_offset;
            values.iter_mut().for_each(|value| *value += offset);
        }
        Ok(of_values(name, values))
    }
}

/// The elements of a vector, whose size was checked when its tensor was found.
fn values(tensor: &Tensor) -> Vec<f32> {
    let mut values = vec![0.0; tensor.shape().iter().product()];
    let row = Matrix::new(tensor.dtype(), 1, values.len(), tensor.bytes());
    row.expect("as many bytes as elements")
        .dequantize_row(0, &mut values);
    values
}
