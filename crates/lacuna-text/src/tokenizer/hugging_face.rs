//! Tokenizers from the files of a Hugging Face folder.
//!
//! `tokenizer.json` is read here rather than by the `tokenizers` crate, which panics on some files
//! it cannot use and ignores the ids that the file states; its components are then built one by one.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::AddedToken;
use tokenizers::models::bpe::Vocab;

use lacuna_files::huggingface::python_json;
use lacuna_files::{MappingError, open_regular};

use super::error::{TokenizerError, VocabularyError, excerpt};
use super::normalizer::Normalizer;
use super::parts::{self, Decoder, Surround};
use super::pieces::{Pieces, TokenKind, byte_token};
use super::pipeline::{Algorithm, Pipeline};
use super::special::end_of_generation;
use super::words::Step;
use super::{MAX_TOKENS, Tokenizer, longest_token_bytes};

mod bpe;
mod convert;
mod unigram;
mod word_piece;

pub use convert::Vocabulary;

use bpe::Bpe;
use word_piece::WordPieces;

/// A larger file is refused unread; the largest published ones have 35 MB.
const MAX_FILE_BYTES: u64 = 1 << 28;

/// The contents of a folder's files, each absent where the folder lacks it.
#[derive(Clone, Copy, Debug, Default)]
pub struct HuggingFaceFiles<'a> {
    /// `tokenizer.json`, the one that is required.
    pub tokenizer: &'a str,
    /// `tokenizer_config.json`: special tokens, the chat template.
    pub tokenizer_config: Option<&'a str>,
    /// `special_tokens_map.json`: special tokens that the former leaves out.
    pub special_tokens_map: Option<&'a str>,
    /// `generation_config.json`: every token that ends a generation.
    pub generation_config: Option<&'a str>,
    /// `config.json`: the end token where nothing else names it.
    pub config: Option<&'a str>,
    /// `chat_template.jinja`, which counts before the others.
    pub chat_template_jinja: Option<&'a str>,
    /// `chat_template.json`, which counts before `tokenizer_config.json`.
    pub chat_template_json: Option<&'a str>,
}

/// The same, owned.
struct Contents {
    tokenizer: String,
    tokenizer_config: Option<String>,
    special_tokens_map: Option<String>,
    generation_config: Option<String>,
    config: Option<String>,
    chat_template_jinja: Option<String>,
    chat_template_json: Option<String>,
}

impl Contents {
    fn read(folder: &Path) -> Result<Contents, TokenizerError> {
        let required = folder.join("tokenizer.json");
        let tokenizer = read(&required)?.ok_or_else(|| TokenizerError::Io {
            path: required,
            source: std::io::ErrorKind::NotFound.into(),
        })?;
        let optional = |name: &str| read(&folder.join(name));
        Ok(Contents {
            tokenizer,
            tokenizer_config: optional("tokenizer_config.json")?,
            special_tokens_map: optional("special_tokens_map.json")?,
            generation_config: optional("generation_config.json")?,
            config: optional("config.json")?,
            chat_template_jinja: optional("chat_template.jinja")?,
            chat_template_json: optional("chat_template.json")?,
        })
    }

    fn files(&self) -> HuggingFaceFiles<'_> {
        HuggingFaceFiles {
            tokenizer: &self.tokenizer,
            tokenizer_config: self.tokenizer_config.as_deref(),
            special_tokens_map: self.special_tokens_map.as_deref(),
            generation_config: self.generation_config.as_deref(),
            config: self.config.as_deref(),
            chat_template_jinja: self.chat_template_jinja.as_deref(),
            chat_template_json: self.chat_template_json.as_deref(),
        }
    }
}

impl Tokenizer {
    /// Builds the tokenizer of a folder with a `tokenizer.json`.
    pub fn from_folder(folder: &Path) -> Result<Tokenizer, TokenizerError> {
        Tokenizer::from_hugging_face(&Contents::read(folder)?.files())
    }

    /// Builds the tokenizer from the contents of the files.
    ///
    /// Truncation and padding that the file asks for are left out: a text is encoded whole. What
    /// goes around a text is what the file's post-processor says; where that says nothing,
    /// `add_bos_token` and `add_eos_token` of `tokenizer_config.json` are followed.
    pub fn from_hugging_face(files: &HuggingFaceFiles) -> Result<Tokenizer, TokenizerError> {
        let file: TokenizerFile = json("tokenizer.json", files.tokenizer)?;
        let settings = Settings::read(files)?;
        let model = Model::read(file.model.get())?;
        let added = file.added_tokens(&settings);
        let decoder = parts::decoder(file.decoder.as_ref())?;
        let pieces = pieces(&model, &added, decoder)?;
        let normalizer = parts::normalizer(file.normalizer)?;
        let steps = parts::steps(file.pre_tokenizer.as_ref())?;
        let surround = parts::surround(file.post_processor.as_ref())?;
        let special = added.iter().filter(|token| token.special);
        let special = special.map(|token| token.content.as_str()).collect();
        let (algorithm, merges) = model.build(normalizer, steps, &special)?;
        let (tokens, ids) = split(added);
        let special_ids = ids.clone();
        let pipeline = Pipeline::new(algorithm, &tokens, ids)?;
        let named = |name: Option<&String>| name.and_then(|name| pipeline.id(name));
        let bos = named(settings.bos.as_ref()).or(settings.bos_id);
        let eos = named(settings.eos.as_ref()).or(settings.end_ids.first().copied());
        let special = |name: &str| special_ids.get(name).copied();
        let stated = settings.end_ids.iter().copied().chain(eos);
        let ends = end_of_generation(stated.filter(|id| (*id as usize) < pieces.len()), special);
        let Surround {
            before,
            between,
            after,
        } = surround.or_else(|| settings.surround(bos, eos));
        check_surround([&before, &between, &after], &pieces)?;
        Ok(Tokenizer {
            longest_token_bytes: longest_token_bytes(&pipeline, &pieces, decoder.spelling),
            pipeline,
            leading: decoder.leading,
            bos: bos.filter(|id| (*id as usize) < pieces.len()),
            eos: eos.filter(|id| (*id as usize) < pieces.len()),
            ends,
            before,
            between,
            after,
            pre_tokenizer: None,
            merges,
            chat_templates: settings.chat_templates,
            pieces,
        })
    }
}

/// The `model` object of `tokenizer.json`.
enum Model {
    Bpe(Bpe),
    WordPiece(WordPieces),
    Unigram(unigram::Pieces),
}

/// The model's type; files older than the field are all BPE.
#[derive(Deserialize)]
struct Type {
    #[serde(rename = "type", default)]
    name: Option<String>,
}

impl Model {
    fn read(text: &str) -> Result<Model, TokenizerError> {
        let Type { name } = json("tokenizer.json", text)?;
        match name.as_deref() {
            None | Some("BPE") => Bpe::read(text).map(Model::Bpe),
            Some("WordPiece") => WordPieces::read(text).map(Model::WordPiece),
            Some("Unigram") => unigram::Pieces::read(text).map(Model::Unigram),
            Some(other) => Err(TokenizerError::UnsupportedModel {
                model: excerpt(other),
            }),
        }
    }

    fn vocab(&self) -> &Vocab {
        match self {
            Model::Bpe(bpe) => &bpe.vocab,
            Model::WordPiece(pieces) => &pieces.vocab,
            Model::Unigram(pieces) => &pieces.vocab,
        }
    }

    /// What a token of its vocabulary is for.
    fn kind(&self, text: &str) -> TokenKind {
        match self {
            Model::Bpe(bpe) if bpe.byte_fallback && byte_token(text).is_some() => TokenKind::Byte,
            Model::Bpe(_) | Model::WordPiece(_) => TokenKind::Normal,
            Model::Unigram(pieces) => pieces.kind(text),
        }
    }

    /// The algorithm, and how many pairs merge.
    fn build(
        self,
        normalizer: Normalizer,
        steps: Vec<Step>,
        special: &HashSet<&str>,
    ) -> Result<(Algorithm, usize), TokenizerError> {
        match self {
            Model::Bpe(bpe) => {
                let merges = bpe.merges.len();
                let algorithm = Algorithm::Bpe {
                    normalizer,
                    steps,
                    bigrams: bpe.bigrams(),
                    model: Box::new(bpe.build()?),
                };
                Ok((algorithm, merges))
            }
            Model::WordPiece(pieces) => {
                let algorithm = Algorithm::WordPiece {
                    normalizer,
                    steps,
                    model: Box::new(pieces.build()?),
                };
                Ok((algorithm, 0))
            }
            Model::Unigram(pieces) => {
                let algorithm = Algorithm::Unigram {
                    normalizer,
                    steps,
                    model: Box::new(pieces.build(special)?),
                };
                Ok((algorithm, 0))
            }
        }
    }
}

#[derive(Deserialize)]
struct TokenizerFile<'a> {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Option<Value>,
    #[serde(default)]
    pre_tokenizer: Option<Value>,
    #[serde(default)]
    post_processor: Option<Value>,
    #[serde(default)]
    decoder: Option<Value>,
    #[serde(borrow)]
    model: &'a serde_json::value::RawValue,
}

/// A token added to the model's vocabulary.
#[derive(Clone, Deserialize)]
struct Added {
    #[serde(default)]
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: Option<bool>,
    #[serde(default)]
    special: bool,
}

impl Added {
    fn kind(&self) -> TokenKind {
        if self.special {
            TokenKind::Control
        } else {
            TokenKind::UserDefined
        }
    }

    fn to_crate(&self) -> AddedToken {
        AddedToken::from(self.content.as_str(), self.special)
            .single_word(self.single_word)
            .lstrip(self.lstrip)
            .rstrip(self.rstrip)
            .normalized(self.normalized.unwrap_or(!self.special))
    }
}

impl TokenizerFile<'_> {
    /// The file's added tokens and those that only `tokenizer_config.json` knows.
    fn added_tokens(&self, settings: &Settings) -> Vec<Added> {
        let known: HashSet<&str> = self
            .added_tokens
            .iter()
            .map(|token| token.content.as_str())
            .collect();
        let more = settings
            .added
            .iter()
            .filter(|token| !known.contains(token.content.as_str()));
        self.added_tokens
            .iter()
            .chain(more)
            .filter(|token| !token.content.is_empty())
            .cloned()
            .collect()
    }
}

/// What the smaller files say.
#[derive(Default)]
struct Settings {
    bos: Option<String>,
    eos: Option<String>,
    bos_id: Option<u32>,
    end_ids: Vec<u32>,
    add_bos: bool,
    add_eos: bool,
    padding: Option<String>,
    padding_id: Option<u32>,
    added: Vec<Added>,
    chat_templates: Vec<(String, String)>,
}

impl Settings {
    fn read(files: &HuggingFaceFiles) -> Result<Settings, TokenizerError> {
        let config: TokenizerConfig = optional("tokenizer_config.json", files.tokenizer_config)?;
        let map: TokenizerConfig = optional("special_tokens_map.json", files.special_tokens_map)?;
        let generation: Ids = optional("generation_config.json", files.generation_config)?;
        let model: Ids = optional("config.json", files.config)?;
        let stated = if generation.eos_token_id.is_null() {
            &model
        } else {
            &generation
        };
        let jinja = files
            .chat_template_jinja
            .map(|source| Value::String(source.to_owned()));
        let file: TokenizerConfig = optional("chat_template.json", files.chat_template_json)?;
        let template = jinja.or(file.chat_template).or(config.chat_template);
        Ok(Settings {
            bos: token_text(&config.bos_token).or_else(|| token_text(&map.bos_token)),
            eos: token_text(&config.eos_token).or_else(|| token_text(&map.eos_token)),
            bos_id: ids(&generation.bos_token_id)
                .chain(ids(&model.bos_token_id))
                .next(),
            end_ids: ids(&stated.eos_token_id).collect(),
            add_bos: config.add_bos_token == Some(true),
            add_eos: config.add_eos_token == Some(true),
            padding: token_text(&config.pad_token),
            padding_id: ids(&generation.pad_token_id)
                .chain(ids(&model.pad_token_id))
                .next(),
            added: config
                .added_tokens_decoder
                .into_iter()
                .filter_map(numbered)
                .collect(),
            chat_templates: template.as_ref().map(templates).unwrap_or_default(),
        })
    }

    fn surround(&self, bos: Option<u32>, eos: Option<u32>) -> Surround {
        Surround {
            between: Vec::new(),
            before: bos.filter(|_| self.add_bos).into_iter().collect(),
            after: eos.filter(|_| self.add_eos).into_iter().collect(),
        }
    }
}

/// `tokenizer_config.json`, and the fields of it that the two other files have.
#[derive(Default, Deserialize)]
#[serde(default)]
struct TokenizerConfig {
    bos_token: Value,
    eos_token: Value,
    pad_token: Value,
    add_bos_token: Option<bool>,
    add_eos_token: Option<bool>,
    added_tokens_decoder: HashMap<String, Added>,
    chat_template: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Ids {
    bos_token_id: Value,
    pad_token_id: Value,
    eos_token_id: Value,
}

/// One id or a list of them.
fn ids(value: &Value) -> impl Iterator<Item = u32> + '_ {
    let one = std::slice::from_ref(value);
    let all = value.as_array().map_or(one, Vec::as_slice);
    all.iter()
        .filter_map(Value::as_u64)
        .filter_map(|id| u32::try_from(id).ok())
}

/// A token given as text or as an object with its properties.
fn token_text(value: &Value) -> Option<String> {
    value
        .as_str()
        .or_else(|| value.get("content")?.as_str())
        .map(str::to_owned)
}

fn numbered((id, token): (String, Added)) -> Option<Added> {
    Some(Added {
        id: id.parse().ok()?,
        ..token
    })
}

/// One template, or a list of named ones.
fn templates(value: &Value) -> Vec<(String, String)> {
    let named = |entry: &Value| {
        let text = |key: &str| entry.get(key).and_then(Value::as_str).map(str::to_owned);
        Some((text("name")?, text("template")?))
    };
    match value {
        Value::String(source) => vec![("default".to_owned(), source.clone())],
        Value::Array(list) => list.iter().filter_map(named).collect(),
        _ => Vec::new(),
    }
}

/// What every id decodes to. An added token counts before the vocabulary's own.
fn pieces(model: &Model, added: &[Added], decoder: Decoder) -> Result<Pieces, TokenizerError> {
    let mut table: Vec<Option<(&str, TokenKind)>> = Vec::new();
    table.try_reserve(model.vocab().len())?;
    let own = model.vocab().iter();
    let own = own.map(|(text, id)| (*id, text.as_str(), model.kind(text)));
    let added = added
        .iter()
        .map(|token| (token.id, token.content.as_str(), token.kind()));
    for (id, text, kind) in own.chain(added) {
        let index = id as usize;
        if index >= MAX_TOKENS {
            let (token, tokens) = (excerpt(text), model.vocab().len());
            return Err(VocabularyError::IdGap { token, id, tokens }.into());
        }
        if index >= table.len() {
            table.try_reserve(index + 1 - table.len())?;
            table.resize(index + 1, None);
        }
        table[index] = Some((text, kind));
    }
    if table.is_empty() {
        return Err(VocabularyError::Empty.into());
    }
    let mut pieces = Pieces::default();
    for entry in table {
        match entry {
            Some((text, kind)) => pieces.push(text, kind, decoder.spelling),
            None => pieces.pad_to(pieces.len() + 1),
        }
    }
    Ok(pieces)
}

fn split(added: Vec<Added>) -> (Vec<AddedToken>, HashMap<String, u32>) {
    let tokens = added.iter().map(Added::to_crate).collect();
    let ids = added
        .into_iter()
        .map(|token| (token.content, token.id))
        .collect();
    (tokens, ids)
}

fn check_surround(ids: [&[u32]; 3], pieces: &Pieces) -> Result<(), VocabularyError> {
    let tokens = pieces.len();
    let mut ids = ids.into_iter().flatten();
    match ids.find(|id| **id as usize >= tokens) {
        None => Ok(()),
        Some(id) => Err(VocabularyError::SpecialOutOfRange {
            role: "a token of the post-processor",
            id: *id,
            tokens,
        }),
    }
}

fn json<'a, T: Deserialize<'a>>(file: &'static str, text: &'a str) -> Result<T, TokenizerError> {
    serde_json::from_str(text).map_err(|source| TokenizerError::Json { file, source })
}

fn optional<T: DeserializeOwned + Default>(
    file: &'static str,
    text: Option<&str>,
) -> Result<T, TokenizerError> {
    let Some(text) = text else {
        return Ok(T::default());
    };
    // Python writes these files, with `Infinity` in `config.json` of some models.
    python_json(text.as_bytes()).map_err(|source| TokenizerError::Json { file, source })
}

/// The file's text, or `None` if there is no such file.
fn read(path: &Path) -> Result<Option<String>, TokenizerError> {
    use std::io::{Error, ErrorKind, Read};
    let failed = |source| TokenizerError::Io {
        path: path.to_owned(),
        source,
    };
    let file = match open_regular(path) {
        Ok(file) => file,
        Err(MappingError::NotFound { .. }) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut text = String::new();
    file.take(MAX_FILE_BYTES + 1)
        .read_to_string(&mut text)
        .map_err(failed)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(failed(Error::new(
            ErrorKind::FileTooLarge,
            "larger than any tokenizer file",
        )));
    }
    Ok(Some(text))
}
