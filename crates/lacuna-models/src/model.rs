//! A model: description, weights in their file, vocabulary and chat template.

use std::ops::Range;

use lacuna_kernels::Cpu;

use crate::error::{ConfigError, ForwardError, LoadError, PromptError};
use crate::executor::{self, Batch, Pass, Segment, Texts};
use crate::families::{Description, heads};
use crate::layers::HEAD_PROJECTION;
use crate::plan::{Residency, WeightPlan};
use crate::program::{Program, TensorName};
use crate::prompts::Prompts;
use crate::recommended::RecommendedSampling;
use crate::scratch::Scratch;
use crate::spec::{HeadSpec, ImageAttention, ImageInput, ImageTokenBounds, ModelSpec};
use crate::vision::{ImageEncoder, ImageTokens, image_prompt};
use crate::weights::{
    Beside, ExpertCounts, Loading, NeuronReads, RowReads, Streams, Weights, name_in,
};
use lacuna_files::{Metadata, ModelFiles};
use lacuna_text::reply::{Effort, Format, Reader};
use lacuna_text::template::{Chat, ChatTemplate, Message};
use lacuna_text::tokenizer::{EncodeLimits, MarkedText, Tokenizer};

/// A loaded model. Immutable: KV caches and activations are passed in.
#[derive(Debug)]
pub struct Model {
    files: ModelFiles,
    spec: ModelSpec,
    program: Program,
    weights: Weights,
    weight_plan: WeightPlan,
    active_weight_bytes: u64,
    tokenizer: Tokenizer,
    recommended_sampling: RecommendedSampling,
    prompts: Prompts,
    images: Option<ImageEncoder>,
    /// The tokens that the outputs of its head are of, if they are not the model's own.
    head_tokens: Option<Vec<u32>>,
}

/// What a pass leaves for who guesses tokens.
#[derive(Debug, Clone, Copy)]
pub struct Outputs<'a> {
    /// The rows of logits that were asked for.
    pub logits: &'a [f32],
    /// What the head takes: of a model's pass, rows of all tokens; of the head's own, of those that have logits.
    pub features: &'a [f32],
}

/// A conversation that asks for a reply.
#[derive(Debug)]
pub struct Prompt {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// What takes the reply apart, decoded with [`lacuna_text::tokenizer::SpecialText::Mark`], if the model
    /// tells thoughts from what it says.
    pub reader: Option<Reader>,
}

impl Model {
    /// Checks and connects the parts of a model. Weights stay in their files, but for those in forms that
    /// cannot be computed from, which are converted.
    ///
    /// # Errors
    /// [`LoadError`], naming the part that is missing, damaged or not supported.
    pub fn load(files: ModelFiles) -> Result<Self, LoadError> {
        Self::load_as(files, Loading::mapped(&mut ()))
    }

    /// The same, with weights where `loading` says, which is planned for these files.
    ///
    /// # Errors
    /// As [`Model::load`], and when weights cannot be read.
    pub fn load_as(files: ModelFiles, loading: Loading<'_>) -> Result<Self, LoadError> {
        let description = describe(&files)?;
        Self::load_described(files, description, loading)
    }

    /// The same of files that have been described ([`describe`]): with the head that guesses tokens, where the description
    /// has been given it ([`Description::with_head`]).
    ///
    /// # Errors
    /// As [`Model::load_as`].
    pub fn load_described(
        files: ModelFiles,
        description: Description,
        loading: Loading<'_>,
    ) -> Result<Self, LoadError> {
        let loaded = Self::connect(files.clone(), description, loading);
        files.check()?;
        loaded
    }

    fn connect(
        files: ModelFiles,
        description: Description,
        loading: Loading<'_>,
    ) -> Result<Self, LoadError> {
        let program = Program::new(&description.spec);
        let weight_plan = WeightPlan {
            loaded: Some(loading.residency.clone()),
            ..WeightPlan::of_files(&files, &description)
        };
        let weights = Weights::load(
            files.tensors(),
            Beside::of(&files),
            &description,
            &program,
            &weight_plan,
            loading,
        )?;
        let head_tokens = match (files.head_metadata(), &description.spec.head) {
            (Some(metadata), Some(_)) => {
                heads::tokens(metadata, files.tensors(), &description.spec)?
            }
            _ => None,
        };
        files.tensors().release_sources();
        let active_weight_bytes = description.active_bytes(&weight_plan);
        let tokenizer = tokenizer(&files, &description.spec)?;
        let recommended_sampling = RecommendedSampling::of(files.metadata())?;
        let prompts = Prompts::of(files.metadata())?;
        Ok(Self {
            files,
            spec: description.spec,
            program,
            weights,
            weight_plan,
            active_weight_bytes,
            tokenizer,
            recommended_sampling,
            prompts,
            images: None,
            head_tokens,
        })
    }

    /// The same with what makes rows of images for it.
    ///
    /// # Errors
    /// [`LoadError::Config`] for a projector of another model, and a model that takes no images.
    pub fn with_images(mut self, encoder: ImageEncoder) -> Result<Self, LoadError> {
        encoder.check_decoder(&self.spec)?;
        if self.spec.images.is_none() {
            // Its tensors are the same: rows of images take the places of others.
            self.spec.images = encoder.spec().images;
            self.program = Program::new(&self.spec);
        }
        Ok(Self {
            images: Some(encoder),
            ..self
        })
    }

    /// The same for images of so many tokens; as it is where `bounds` say nothing.
    ///
    /// # Errors
    /// As [`ModelSpec::with_image_tokens`]; of a model without [`Model::images`] too.
    pub fn with_image_tokens(mut self, bounds: ImageTokenBounds) -> Result<Self, LoadError> {
        if bounds.are_none() {
            return Ok(self);
        }
        self.images = match self.images {
            Some(encoder) => Some(encoder.with_image_tokens(bounds)?),
            None => return Err(ImageTokenBounds::useless().into()),
        };
        Ok(self)
    }

    /// What makes rows of images for it, if it sees.
    #[must_use]
    pub fn images(&self) -> Option<&ImageEncoder> {
        self.images.as_ref()
    }

    /// A rendered conversation in which images have their places.
    #[must_use]
    pub fn with_places(&self, rendered: MarkedText) -> MarkedText {
        match (&self.images, self.spec.images) {
            (Some(_), Some(ImageInput { prompt, .. })) if prompt.mark != prompt.written => {
                rendered.with_marks_as(prompt.mark, prompt.written)
            }
            _ => rendered,
        }
    }

    /// Puts the tokens of `images` in their places among those of a rendered conversation. Returns the positions of each
    /// picture, image by image.
    ///
    /// # Errors
    /// [`PromptError::NoImages`] and [`PromptError::ImageCount`].
    pub fn place_images(
        &self,
        tokens: &mut Vec<u32>,
        images: &[ImageTokens],
    ) -> Result<Vec<Range<usize>>, PromptError> {
        match (&self.images, &self.spec.images) {
            (Some(_), Some(input)) => {
                image_prompt::place(&input.prompt, &self.tokenizer, tokens, images)
            }
            _ if images.is_empty() => Ok(Vec::new()),
            _ => Err(PromptError::NoImages),
        }
    }

    /// Runs `segments` through the model and returns the rows of logits they ask for, one after
    /// another, each of vocabulary size. The rows of the new tokens are stored in each segment's
    /// sequence but not accepted.
    ///
    /// # Errors
    /// [`ForwardError`]: before anything is computed, because the model has no logits, or because the
    /// result is of no use.
    pub fn forward<'a>(
        &self,
        cpu: &Cpu,
        segments: &mut [Segment<'_>],
        scratch: &'a mut Scratch,
    ) -> Result<&'a [f32], ForwardError> {
        if self.spec.pooled().is_some() {
            return Err(ForwardError::NoLogits);
        }
        let pass = self.pass(cpu, segments, scratch)?;
        let rows = pass.size.logit_rows;
        self.run(pass)?;
        Ok(self.output(scratch, rows * self.spec.vocabulary))
    }

    /// The same, and what a head takes of the tokens, where the model was loaded with one: rows of the residual stream's
    /// width, one for each token. Without a head there are none.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn forward_with_features<'a>(
        &self,
        cpu: &Cpu,
        segments: &mut [Segment<'_>],
        scratch: &'a mut Scratch,
    ) -> Result<Outputs<'a>, ForwardError> {
        let tokens = segments.iter().map(|segment| segment.tokens.len()).sum();
        let vocabulary = self.spec.vocabulary;
        let rows = self.forward(cpu, segments, scratch)?.len() / vocabulary;
        Ok(self.outputs(&self.program, scratch, (rows, vocabulary), tokens))
    }

    /// Runs `segments` through the head that guesses tokens, whose rows their sequences keep ([`ModelSpec::of_head`]), or over
    /// the model's sequences, where it keeps none ([`Model::borrows_rows`]): the
    /// logits after a token are of the one that comes next, [`ModelSpec::head_outputs`] of them ([`Model::head_token`]).
    /// `features`, `[tokens, hidden]`, are those of the token before each,
    /// as [`Model::forward_with_features`] left them, or, where that was guessed, this function.
    ///
    /// # Errors
    /// As [`Model::forward`]; [`ForwardError::NoHead`] for a model that was loaded without one, and
    /// [`ForwardError::HeadWeights`] while weights that the head shares with the model are not in memory.
    pub fn guess<'a>(
        &self,
        cpu: &Cpu,
        segments: &mut [Segment<'_>],
        features: &[f32],
        scratch: &'a mut Scratch,
    ) -> Result<Outputs<'a>, ForwardError> {
        let Some(program) = self.program.head() else {
            return Err(ForwardError::NoHead);
        };
        let limits = scratch.limits();
        let size = match self.borrows_rows() {
            true => executor::check_borrowed(segments, limits, self.spec.vocabulary)?,
            false => executor::check(segments, limits, &self.spec)?,
        };
        if features.len() != size.tokens * self.spec.hidden {
            return Err(ForwardError::FeatureCount {
                elements: features.len(),
                tokens: size.tokens,
            });
        }
        let stream = self.weights.stream();
        if let Some(stream) = &stream
            && program.matrices().any(|matrix| stream.reads(matrix))
        {
            return Err(ForwardError::HeadWeights);
        }
        let pass = Pass {
            weights: &self.weights,
            cpu,
            size,
            batch: Batch::Segments(segments),
            scratch: &mut *scratch,
            stream,
            shared: None,
            image_attention: ImageAttention::Causal,
            features,
        };
        self.run_program(pass, program)?;
        let rows = (size.logit_rows, self.spec.head_outputs());
        Ok(self.outputs(program, scratch, rows, size.logit_rows))
    }

    /// Whether its head reads rows that the model keeps, and keeps none itself ([`HeadSpec::borrows_rows`]).
    ///
    /// [`HeadSpec::borrows_rows`]: crate::spec::HeadSpec::borrows_rows
    #[must_use]
    pub fn borrows_rows(&self) -> bool {
        self.spec.head.as_ref().is_some_and(HeadSpec::borrows_rows)
    }

    /// The token that an output of the head is of.
    ///
    /// # Panics
    /// For an output that it has not.
    #[must_use]
    pub fn head_token(&self, output: u32) -> u32 {
        match &self.head_tokens {
            None => output,
            Some(tokens) => tokens[output as usize],
        }
    }

    /// What a pass of `program` has left: so many rows of logits, of so many each, and of features.
    fn outputs<'a>(
        &self,
        program: &Program,
        scratch: &'a mut Scratch,
        (rows, vocabulary): (usize, usize),
        of_features: usize,
    ) -> Outputs<'a> {
        let hidden = self.spec.hidden;
        let Some(features) = program.features() else {
            return Outputs {
                logits: self.output(scratch, rows * vocabulary),
                features: &[],
            };
        };
        let [logits, features] = scratch.slots([program.output(), features]);
        Outputs {
            logits: &bytemuck::cast_slice(logits)[..rows * vocabulary],
            features: &bytemuck::cast_slice(features)[..of_features * hidden],
        }
    }

    /// Takes the states of layers back to the first tokens of the last pass, those of each of `segments`, whose sequences
    /// [`Sequence::prepare_to_rewind`](lacuna_kv::Sequence::prepare_to_rewind) has prepared for it: they are then what they are
    /// when the others have never been there. Those tokens are still to be accepted. Costs what the states cost in a pass.
    ///
    /// # Errors
    /// [`ForwardError`] for segments that no pass could compute.
    ///
    /// # Panics
    /// As [`Sequence::rewind`](lacuna_kv::Sequence::rewind).
    pub fn rewind(
        &self,
        cpu: &Cpu,
        segments: &mut [Segment<'_>],
        scratch: &mut Scratch,
    ) -> Result<(), ForwardError> {
        let mut has_states = false;
        for segment in &mut *segments {
            has_states |= segment.sequence.rewind(segment.tokens.len());
        }
        match has_states {
            true => {
                let mut pass = self.pass(cpu, segments, scratch)?;
                // Nothing is multiplied.
                pass.stream = None;
                pass.run_states(&self.program)
            }
            false => Ok(()),
        }
    }

    /// A forward pass of segments, which are checked.
    pub(crate) fn pass<'a, 'b>(
        &'a self,
        cpu: &'a Cpu,
        segments: &'a mut [Segment<'b>],
        scratch: &'a mut Scratch,
    ) -> Result<Pass<'a, 'b>, ForwardError> {
        let size = executor::check(segments, scratch.limits(), &self.spec)?;
        Ok(Pass {
            weights: &self.weights,
            cpu,
            size,
            batch: Batch::Segments(segments),
            scratch,
            stream: self.weights.stream(),
            shared: None,
            image_attention: self.spec.image_attention(),
            features: &[],
        })
    }

    /// Runs `texts` through the model and returns a vector of each, one after another: its embedding, of
    /// [`ModelSpec::embedding_width`] elements, or its scores. Nothing is kept of them. A text's vector
    /// does not depend on what else is in the batch.
    ///
    /// # Errors
    /// [`ForwardError`]: before anything is computed, because the model makes no such vectors, or because
    /// the result is of no use.
    pub fn embed<'a>(
        &self,
        cpu: &Cpu,
        texts: &Texts,
        scratch: &'a mut Scratch,
    ) -> Result<&'a [f32], ForwardError> {
        let Some(pooled) = self.spec.pooled() else {
            return Err(ForwardError::NoEmbeddings);
        };
        let width = pooled.width(self.spec.hidden);
        let size = executor::check_texts(texts, scratch, &self.spec)?;
        let pass = Pass {
            weights: &self.weights,
            cpu,
            size,
            batch: Batch::Texts(texts),
            scratch: &mut *scratch,
            stream: self.weights.stream(),
            shared: None,
            image_attention: self.spec.image_attention(),
            features: &[],
        };
        self.run(pass)?;
        Ok(self.output(scratch, size.logit_rows * width))
    }

    fn run(&self, pass: Pass<'_, '_>) -> Result<(), ForwardError> {
        self.run_program(pass, &self.program)
    }

    fn run_program(&self, mut pass: Pass<'_, '_>, program: &Program) -> Result<(), ForwardError> {
        let computed = pass.run(program);
        // First, because whatever a lost file's zeros led to is no news.
        self.files.check()?;
        computed
    }

    /// What the pass has left.
    fn output<'a>(&self, scratch: &'a mut Scratch, elements: usize) -> &'a [f32] {
        let [output] = scratch.slots([self.program.output()]);
        &bytemuck::cast_slice(output)[..elements]
    }

    pub(crate) fn weights(&self) -> &Weights {
        &self.weights
    }

    /// The model's layers and constants.
    #[must_use]
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The forward pass, from which the arena of a [`Scratch`] is planned.
    #[must_use]
    pub fn program(&self) -> &Program {
        &self.program
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

    /// How its makers recommend that tokens are chosen.
    #[must_use]
    pub fn recommended_sampling(&self) -> &RecommendedSampling {
        &self.recommended_sampling
    }

    /// What its makers put in front of texts that are embedded.
    #[must_use]
    pub fn prompts(&self) -> &Prompts {
        &self.prompts
    }

    /// Its tensors, and where they are.
    #[must_use]
    pub fn weight_plan(&self) -> &WeightPlan {
        &self.weight_plan
    }

    /// Brings weights where `residency` has them, which is planned for this model. A pass under way is waited for.
    ///
    /// # Errors
    /// When weights that are to be in memory cannot be read; what less memory takes is no reason. All are where they
    /// were then.
    pub fn place_weights(&self, residency: &Residency) -> Result<(), LoadError> {
        match self.weights.streams() {
            Some(streams) => streams.place(residency, &mut ()),
            None => Ok(()),
        }
    }

    /// Says which tokens come after those of the next pass, as far as that is known: where tables are read by row, their
    /// rows are read while that pass computes.
    pub fn expect(&self, tokens: &[u32]) {
        if let Some(streams) = self.weights.streams() {
            streams.expect(tokens);
        }
    }

    /// How rows of tables that are in files have been had. A pass under way is waited for.
    #[must_use]
    pub fn row_reads(&self) -> RowReads {
        let streams = self.weights.streams();
        streams.map_or_else(RowReads::default, Streams::row_reads)
    }

    /// Memory of weights that are read, as they were placed last.
    #[must_use]
    pub fn placed_bytes(&self) -> u64 {
        self.weights.streams().map_or(0, Streams::bytes)
    }

    /// What slots of experts have been asked for since it was loaded; `None` where experts are in mapped files, or there are
    /// none.
    #[must_use]
    pub fn expert_counts(&self) -> Option<ExpertCounts> {
        let has_slots = !self.weight_plan.experts.is_empty();
        let streams = self.weights.streams().filter(|_| has_slots);
        streams.map(Streams::expert_counts)
    }

    /// What has been asked of neurons since it was loaded; `None` without a file of their columns, or where it is not used.
    #[must_use]
    pub fn neuron_reads(&self) -> Option<NeuronReads> {
        let has_columns = !self.weight_plan.neurons.is_empty();
        let streams = self.weights.streams().filter(|_| has_columns);
        streams.map(Streams::neuron_reads)
    }

    /// How weights are read, for people; `None` where they are used in mapped files.
    #[must_use]
    pub fn reading(&self) -> Option<&str> {
        self.weights.streams().map(Streams::reading)
    }

    /// Bytes of weights, in the files or converted.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        self.files.tensors().total_bytes()
    }

    /// Of these, bytes that computing one token reads.
    #[must_use]
    pub fn active_weight_bytes(&self) -> u64 {
        self.active_weight_bytes
    }

    /// Tokens of a conversation that asks for a reply, by the model's chat template. A model
    /// without one gets the messages one after another.
    ///
    /// # Errors
    /// [`PromptError`] when the template fails or refuses the messages.
    pub fn prompt(&self, messages: &[Message]) -> Result<Vec<u32>, PromptError> {
        let prompt = self.conversation(messages, None, &EncodeLimits::default())?;
        Ok(prompt.tokens)
    }

    /// The same, if the prompt keeps within `limits`, with what takes the reply apart. `effort` says how
    /// long the model is to think; without it, that is left to the template.
    ///
    /// # Errors
    /// [`PromptError`]; also when the prompt is longer, which is found before all of it is tokenized.
    pub fn conversation(
        &self,
        messages: &[Message],
        effort: Option<Effort>,
        limits: &EncodeLimits,
    ) -> Result<Prompt, PromptError> {
        let format = self.tokenizer.chat_template().and_then(Format::of);
        let variables = effort.into_iter();
        let variables = variables.flat_map(|effort| effort.variables(format));
        let template = ChatTemplate::of(&self.tokenizer)?;
        let text = |id: Option<u32>| id.and_then(|id| self.tokenizer.token_text(id));
        let (bos, eos) = (text(self.tokenizer.bos()), text(self.tokenizer.eos()));
        let chat = Chat {
            messages,
            bos_token: bos.as_deref(),
            eos_token: eos.as_deref(),
            variables: variables.collect(),
            ..Chat::default()
        };
        let rendered = self.with_places(template.render_marked(&chat, &self.tokenizer)?);
        Ok(Prompt {
            tokens: self.tokenizer.encode_marked(&rendered, limits)?,
            reader: format.map(|format| format.reader(&rendered.plain())),
        })
    }
}

/// The vocabulary of a model of `spec`.
///
/// # Errors
/// [`LoadError::Tokenizer`].
pub fn tokenizer(files: &ModelFiles, spec: &ModelSpec) -> Result<Tokenizer, LoadError> {
    let mut tokenizer = Tokenizer::from_files(files)?;
    tokenizer.pad_to(u32::try_from(spec.vocabulary).unwrap_or(u32::MAX));
    Ok(tokenizer)
}

/// What a model is, by its files' own account: no weight is touched, only the directory of tensors.
///
/// # Errors
/// [`LoadError`], naming what is missing, damaged or not supported.
pub fn describe(files: &ModelFiles) -> Result<Description, LoadError> {
    let described = description(files);
    files.check()?;
    described
}

/// Whether files are of a head that guesses tokens for a model (EAGLE-3, an assistant of Gemma 4), which [`with_head`] puts beside it.
#[must_use]
pub fn is_head(files: &ModelFiles) -> bool {
    heads::is_head(files.metadata())
}

/// The files of a model with those of a head beside them: what is made of them has the head
/// ([`Description::has_head`]).
///
/// # Errors
/// [`LoadError::NoHead`] and [`LoadError::HeadTwice`].
pub fn with_head(files: ModelFiles, head: &ModelFiles) -> Result<ModelFiles, LoadError> {
    heads::beside(files, head)
}

fn description(files: &ModelFiles) -> Result<Description, LoadError> {
    if is_head(files) {
        return Err(ConfigError::LoneHead.into());
    }
    let tensors = files.tensors();
    let mut description = match files.metadata() {
        Metadata::Gguf(metadata) => {
            let embedding = tensors.require("token_embd.weight")?;
            let vocabulary = embedding.shape().first().copied().unwrap_or(0);
            Description::from_gguf(metadata, vocabulary, &|name| tensors.rows(name))?
        }
        Metadata::HuggingFace(folder) => Description::from_huggingface(folder)?,
    };
    if let Some(metadata) = files.head_metadata() {
        description.head = Some(heads::describe(metadata, tensors, &description.spec)?);
        description.clone().with_head().spec.validate()?;
        return Ok(description);
    }
    // Folders may say that there is a head and have none of its tensors.
    let name = TensorName {
        layer: Some(description.spec.layers.len()),
        part: HEAD_PROJECTION,
    };
    if !tensors.contains(&name_in(tensors, &description, name, "weight")) {
        description.head = None;
    }
    Ok(description)
}
