//! Fitting the predictors of a model: which blocks at once, what is recorded of them, and the file in the end.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use lacuna_files::ModelFiles;
use lacuna_kernels::Cpu;
use serde::Serialize;

use super::record::{NeuronRecorder, row_bytes};
use super::train::{Quality, STEPS, train};
use super::{BlockShape, Input, Predictor, PredictorsError, inputs, path_in, write};
use crate::plan::WeightPlan;
use crate::program::Program;
use crate::weights::content_name;

/// The most bytes that are recorded at once. The text is computed once for as many blocks as that holds.
const RECORDED_BYTES: u64 = 1 << 30;

/// Tokens without which there are too few to draw the line by, and to say how good it is.
const LEAST_TOKENS: usize = 640;

/// Every fit of a model and a text is the same.
const SEED: u64 = 19;

/// How predictors are fitted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FitSettings {
    /// Directions that a block's neurons are foretold from: more are better and cost more. No more than it has.
    pub rank: usize,
    /// The part of active neurons that is to be named, between 0 and 1. More of it names more that are not.
    pub recall: f64,
}

impl Default for FitSettings {
    fn default() -> Self {
        Self {
            rank: 64,
            recall: 0.95,
        }
    }
}

/// How good the predictor of a block is, on text that it was not fitted to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BlockFit {
    /// The matrix that its activations are multiplied with.
    pub name: String,
    /// Neurons that it has.
    pub neurons: usize,
    /// The part of neurons that a token needs.
    pub active_share: f64,
    /// The part of neurons that is named for a token.
    pub named_share: f64,
    /// The part of needed neurons that is named; of none, all.
    pub recall: f64,
}

impl BlockFit {
    fn new(name: &str, neurons: usize, of: Quality) -> Self {
        let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        Self {
            name: name.to_owned(),
            neurons,
            active_share: share(of.active, of.all),
            named_share: share(of.named, of.all),
            recall: match of.active {
                0 => 1.0,
                active => share(of.right, active),
            },
        }
    }
}

/// What has been fitted.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PredictorFit {
    /// The file.
    pub path: PathBuf,
    /// Bytes of all predictors.
    pub bytes: u64,
    /// Tokens of the text that was fitted to, and on which this was found out.
    pub tokens: usize,
    /// By block.
    pub blocks: Vec<BlockFit>,
    /// Of all of them together.
    pub all: BlockFit,
}

/// Fits the predictors of a model, some blocks at a time: whoever uses it computes the text with a recorder of each
/// ([`PredictorFitter::recorder`]), and gives that back ([`PredictorFitter::fit`]).
#[derive(Debug)]
pub struct PredictorFitter {
    path: PathBuf,
    content: String,
    settings: FitSettings,
    tokens: usize,
    inputs: HashMap<usize, Input>,
    /// With the numbers of their matrices.
    blocks: Vec<(usize, BlockShape)>,
    predictors: Vec<(String, Predictor)>,
    found: Vec<Quality>,
}

impl PredictorFitter {
    /// For a model and a text of so many tokens; the file will be in `folder`, where those of neurons are.
    ///
    /// # Errors
    /// [`PredictorsError`]: a model without such neurons, or a text that is too short or too long.
    pub fn new(
        files: &ModelFiles,
        folder: &Path,
        settings: FitSettings,
        tokens: usize,
    ) -> Result<Self, PredictorsError> {
        let description = crate::describe(files).map_err(Box::new)?;
        let plan = WeightPlan::of(files.tensors(), &description);
        let blocks = plan.predicted_blocks(&description).map_err(Box::new)?;
        if blocks.is_empty() {
            return Err(PredictorsError::NoInputs);
        }
        if tokens < LEAST_TOKENS {
            let needed = LEAST_TOKENS;
            return Err(PredictorsError::TextTooShort { tokens, needed });
        }
        let widest = blocks.iter().map(|(_, shape)| row_bytes(shape)).max();
        let most = (RECORDED_BYTES / widest.unwrap_or(1)) as usize;
        if tokens > most {
            return Err(PredictorsError::TextTooLong { tokens, most });
        }
        std::fs::create_dir_all(folder).map_err(|source| PredictorsError::Write {
            path: folder.to_owned(),
            source,
        })?;
        let content = content_name(files, folder).map_err(Box::new)?;
        Ok(Self {
            path: path_in(folder, &content),
            content,
            settings,
            tokens,
            inputs: inputs(&Program::new(&description.spec)),
            blocks,
            predictors: Vec::new(),
            found: Vec::new(),
        })
    }

    /// Blocks in all.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// What writes down the next blocks' activations; `None` when all have been fitted.
    #[must_use]
    pub fn recorder(&self) -> Option<NeuronRecorder> {
        let mut bytes = 0;
        let rest = self.blocks[self.predictors.len()..].iter();
        let some = rest.take_while(|(_, shape)| {
            bytes += row_bytes(shape) * self.tokens as u64;
            bytes <= RECORDED_BYTES
        });
        let mut some = some.map(|(matrix, shape)| (*matrix, shape)).peekable();
        some.peek()?;
        Some(NeuronRecorder::new(some, &self.inputs, self.tokens))
    }

    /// Fits the blocks of a recorder, which has been through the text. `progress` is told of each step: the block's matrix,
    /// how many steps are done, and of how many.
    ///
    /// # Errors
    /// [`PredictorsError::NotFinite`], and [`PredictorsError::TextTooShort`] for a recorder that was not.
    pub fn fit(
        &mut self,
        cpu: &Cpu,
        recorder: NeuronRecorder,
        progress: &mut dyn FnMut(&str, usize, usize),
    ) -> Result<(), PredictorsError> {
        for of in recorder.into_blocks() {
            let name = of.shape.name.clone();
            if of.is_damaged {
                return Err(PredictorsError::NotFinite { name });
            }
            if of.rows() < LEAST_TOKENS {
                return Err(PredictorsError::TextTooShort {
                    tokens: of.rows(),
                    needed: LEAST_TOKENS,
                });
            }
            let rank = self.settings.rank.clamp(1, of.shape.width);
            let mut done = 0;
            let mut step = || {
                done += 1;
                progress(&name, done, STEPS);
            };
            let asked = (rank, self.settings.recall.clamp(0.0, 1.0));
            let (predictor, quality) = train(cpu, &of, asked, SEED, &mut step);
            self.predictors.push((name, predictor));
            self.found.push(quality);
        }
        Ok(())
    }

    /// Writes the file.
    ///
    /// # Errors
    /// When it cannot be written.
    ///
    /// # Panics
    /// When not all blocks have been fitted.
    pub fn finish(self) -> Result<PredictorFit, PredictorsError> {
        assert_eq!(self.predictors.len(), self.blocks.len(), "all are fitted");
        write(&self.path, &self.content, &self.predictors)?;
        let each = self.blocks.iter().zip(&self.found);
        let each = each.map(|((_, of), found)| BlockFit::new(&of.name, of.neurons, *found));
        let mut all = Quality::default();
        for of in &self.found {
            all.all += of.all;
            all.active += of.active;
            all.named += of.named;
            all.right += of.right;
        }
        let neurons = self.blocks.iter().map(|(_, shape)| shape.neurons);
        let bytes = self.predictors.iter().map(|(_, of)| of.bytes());
        Ok(PredictorFit {
            bytes: bytes.sum(),
            tokens: self.tokens,
            blocks: each.collect(),
            all: BlockFit::new("all blocks", neurons.sum(), all),
            path: self.path,
        })
    }
}
