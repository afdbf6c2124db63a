//! A model: description, weights in their file, vocabulary and chat template.

use lacuna_kernels::Cpu;

use crate::architecture::Description;
use crate::config::Config;
use crate::decoder::{Decoder, Segment};
use crate::error::{ForwardError, LoadError};
use crate::files::ModelFiles;
use crate::scratch::Scratch;
use crate::template::{ChatTemplate, Message, TemplateError};
use crate::tokenizer::{AddSpecial, ParseSpecial, Tokenizer};
use crate::weights::{Names, Source};

/// A loaded model. Immutable: KV caches and activations are passed in.
#[derive(Debug)]
pub struct Model {
    files: ModelFiles,
    description: Description,
    decoder: Decoder,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
}

impl Model {
    /// Checks and connects the parts of a model; weights stay in their files.
    ///
    /// # Errors
    /// [`LoadError`], naming the part that is missing, damaged or not supported.
    pub fn load(files: ModelFiles) -> Result<Self, LoadError> {
        let (description, names) = describe(&files)?;
        let source = Source::new(files.tensors(), names, &description);
        let decoder = Decoder::load(&description.config, &source)?;
        let tokenizer = load_tokenizer(&files)?;
        let template = tokenizer.chat_template().map(ChatTemplate::new).transpose()?;
        Ok(Self { files, description, decoder, tokenizer, template })
    }

    /// Runs `segments` through the model and returns the rows of logits they ask for, one after
    /// another, each of vocabulary size. The rows of the new tokens are stored in each segment's
    /// sequence but not accepted.
    ///
    /// # Errors
    /// [`ForwardError`] before anything is computed.
    pub fn forward<'a>(
        &self,
        cpu: &Cpu,
        segments: &mut [Segment<'_>],
        scratch: &'a mut Scratch,
    ) -> Result<&'a [f32], ForwardError> {
        let rows = self.decoder.forward(self.config(), cpu, segments, scratch)?;
        Ok(scratch.logits(rows, self.config().vocabulary))
    }

    /// The model's numbers.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.description.config
    }

    /// The files behind it.
    #[must_use]
    pub fn files(&self) -> &ModelFiles {
        &self.files
    }

    /// Its vocabulary.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Whether the file comes with a chat template.
    #[must_use]
    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// Bytes of weights in the files.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        self.files.tensors().total_bytes()
    }

    /// Bytes of vectors copied out of the files (norms and biases).
    #[must_use]
    pub fn copied_bytes(&self) -> usize {
        self.decoder.copied_bytes()
    }

    /// The text of a conversation that asks for a reply. Without a chat template it is the contents
    /// one after another.
    ///
    /// # Errors
    /// [`TemplateError`] when the template refuses the messages or fails.
    pub fn render(&self, messages: &[Message]) -> Result<String, TemplateError> {
        todo!()
    }

    /// Tokens of a conversation of one message that asks for a reply.
    ///
    /// # Errors
    /// [`LoadError`] when the template or the tokenizer refuses the text.
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>, LoadError> {
        let rendered = self.render(&[Message::user(text)])?;
        Ok(self.tokenizer.encode(&rendered, Special::RENDERED)?)
    }
}
