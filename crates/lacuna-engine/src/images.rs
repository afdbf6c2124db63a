//! Images of prompts: files become pictures, and pictures rows for the model, each picture once for all that show it.
//!
//! A picture's tokens are numbers made of its name, so all that finds computed tokens again finds computed pictures:
//! the prefix cache, within and across requests, and folders of it.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use lacuna_images::{Filter, Header, Limits, Name, Picture};
use lacuna_kernels::{Cpu, CpuConfig};
use lacuna_models::spec::{Grid, ImageTooLong, Resampling};
use lacuna_models::{
    BatchLimits, ForwardError, ImageEncoder, Model, OutOfMemory, PromptError, Scratch, Shown,
};

use crate::request_memory::{MemoryRefusal, RequestMemory};

/// Why images of a prompt cannot be seen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// A model that takes none.
    #[error("the model does not see: it takes no images")]
    NoEyes,
    /// A file that is no image that can be had.
    #[error(transparent)]
    File(#[from] lacuna_images::Error),
    /// An image of a shape that is not taken.
    #[error(transparent)]
    Shape(#[from] ImageTooLong),
    /// More images than may be sent at once.
    #[error("{given} images are given; at most {limit} are taken at once")]
    TooMany {
        /// How many there are.
        given: usize,
        /// How many there may be.
        limit: usize,
    },
    /// Images that have no places in the prompt.
    #[error(transparent)]
    Prompt(#[from] PromptError),
    /// Memory of requests that is not free.
    #[error("an image takes memory of requests to be decoded and encoded: {0}")]
    Memory(#[from] MemoryRefusal),
    /// The system refused memory or threads.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// The encoder failed.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// Processors that are not there.
    #[error("an image cannot be encoded: {0}")]
    Cpu(String),
}

/// What encodes the images of a model's prompts, and the rows of the last of them.
///
/// Encoding takes the arena of a pass while it lasts, and one image is encoded at a time.
#[derive(Debug)]
pub struct Eyes {
    model: Arc<Model>,
    cpu: CpuConfig,
    limits: Limits,
    /// What memory is taken from; none for whoever has no requests.
    memory: Option<RequestMemory>,
    kept: Mutex<Kept>,
}

/// Rows of pictures, those shown last behind the others.
#[derive(Debug, Default)]
struct Kept {
    pictures: VecDeque<(Name, Arc<[f32]>)>,
    encoded: u64,
}

impl Eyes {
    /// Images of a prompt at most: each takes hundreds of tokens.
    pub const MOST_IMAGES: usize = 64;
    /// Pictures whose rows are kept beside those that requests show.
    const KEPT: usize = 8;

    /// For the prompts of `model`, by `cpu`, and with memory of `memory`.
    #[must_use]
    pub fn new(model: Arc<Model>, cpu: CpuConfig, memory: Option<RequestMemory>) -> Self {
        Self {
            model,
            cpu,
            limits: Limits::default(),
            memory,
            kept: Mutex::default(),
        }
    }

    /// Reads image `files`, puts them in their places among the tokens of a rendered conversation and encodes those that
    /// are not known. Returns what the prompt shows.
    ///
    /// # Errors
    /// [`ImageError`]: of damaged and enormous files, places that are not as many, and memory that is not free.
    pub fn show(
        &self,
        tokens: &mut Vec<u32>,
        files: &[impl AsRef<[u8]>],
    ) -> Result<Vec<Shown>, ImageError> {
        if files.is_empty() {
            // Marks that a template writes by itself are no images.
            self.model.place_images(tokens, &[])?;
            return Ok(Vec::new());
        }
        let encoder = self.model.images().ok_or(ImageError::NoEyes)?;
        if files.len() > Self::MOST_IMAGES {
            return Err(ImageError::TooMany {
                given: files.len(),
                limit: Self::MOST_IMAGES,
            });
        }
        let pictures = files
            .iter()
            .map(|file| self.picture(encoder, file.as_ref()));
        let pictures = pictures.collect::<Result<Vec<_>, _>>()?;
        let shape = encoder.shape();
        let grids: Vec<Grid> = pictures
            .iter()
            .map(|picture| shape.tokens(shape.grid(picture.size())))
            .collect();
        let names = pictures.iter().zip(&grids).map(|(picture, grid)| {
            let Grid { rows, columns } = *grid;
            picture.name().tokens([rows, columns])
        });
        let places = self
            .model
            .place_images(tokens, &names.collect::<Vec<_>>())?;
        let shown = places.into_iter().zip(pictures.iter().zip(grids));
        shown
            .map(|(positions, (picture, grid)): (Range<usize>, _)| {
                let rows = self.rows(encoder, picture)?;
                Ok(Shown {
                    positions,
                    grid,
                    rows,
                })
            })
            .collect()
    }

    /// Tokens of an image, by the header of its file.
    ///
    /// # Errors
    /// [`ImageError`]: of a file that is no image that can be had.
    pub fn tokens(&self, file: &[u8]) -> Result<usize, ImageError> {
        let encoder = self.model.images().ok_or(ImageError::NoEyes)?;
        let header = Header::read(file, &self.limits)?;
        let shape = encoder.shape();
        let size = shape.fit([header.width, header.height].map(|side| side as usize))?;
        Ok(shape.tokens(shape.grid(size)).count())
    }

    /// Images that have been encoded.
    #[must_use]
    pub fn encoded(&self) -> u64 {
        self.kept
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .encoded
    }

    /// Decodes a file whose header says no more than is allowed, in memory that is taken for it.
    fn picture(&self, encoder: &ImageEncoder, file: &[u8]) -> Result<Picture, ImageError> {
        let header = Header::read(file, &self.limits)?;
        let shape = encoder.shape();
        let size = [header.width, header.height].map(|side| side as usize);
        let fitted = shape.fit(size)?;
        let bytes = header.preprocessing_bytes(fitted);
        let memory = self.memory.as_ref();
        let _held = memory.map(|it| it.try_take(bytes as usize)).transpose()?;
        let image = header.decode(file)?;
        // It may have been turned, and then sizes fit otherwise.
        let fitted = shape.fit([image.width(), image.height()])?;
        let filter = match shape.patches.resampling {
            Resampling::Bilinear => Filter::Triangle,
            Resampling::Bicubic => Filter::Cubic,
        };
        Ok(Picture::of(&image, fitted, filter))
    }

    /// The rows of a picture, which are encoded unless they are known.
    fn rows(&self, encoder: &ImageEncoder, picture: &Picture) -> Result<Arc<[f32]>, ImageError> {
        // Held while it is encoded: those who show the same picture wait for it, and there is one arena.
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let name = picture.name();
        if let Some(place) = kept.pictures.iter().position(|(known, _)| *known == name)
            && let Some(found) = kept.pictures.remove(place)
        {
            let rows = Arc::clone(&found.1);
            kept.pictures.push_back(found);
            return Ok(rows);
        }
        let rows = self.encode(encoder, picture)?;
        kept.encoded += 1;
        if kept.pictures.len() == Self::KEPT {
            kept.pictures.pop_front();
        }
        kept.pictures.push_back((name, Arc::clone(&rows)));
        Ok(rows)
    }

    fn encode(&self, encoder: &ImageEncoder, picture: &Picture) -> Result<Arc<[f32]>, ImageError> {
        let grid = encoder.shape().grid(picture.size());
        let limits = encoder.shape().limits(grid);
        let bytes = arena_bytes(encoder, limits);
        let memory = self.memory.as_ref();
        let _held = memory.map(|it| it.try_take(bytes)).transpose()?;
        let arena = encoder.arena(limits).map_err(|_| OutOfMemory { bytes })?;
        let mut scratch = Scratch::new(encoder.program(), arena)?;
        let cpu = Cpu::new(self.cpu).map_err(|error| ImageError::Cpu(error.to_string()))?;
        let rows = encoder.encode(&cpu, (picture.pixels(), grid), &mut scratch)?;
        Ok(rows.into())
    }
}

/// The images whose tokens are among `tokens`, all of which are computed, so that their rows are of no use any more: what comes
/// behind them still depends on their rows and columns.
pub(crate) fn computed(tokens: &[u32]) -> Vec<Shown> {
    let pictures = lacuna_images::pictures_in(tokens);
    let shown = pictures.map(|(positions, [rows, columns])| Shown {
        positions,
        grid: Grid { rows, columns },
        rows: Arc::from([]),
    });
    shown.collect()
}

/// Bytes of the arena of a pass within `limits`; more than there can be where no memory has as many.
fn arena_bytes(encoder: &ImageEncoder, limits: BatchLimits) -> usize {
    let arena = encoder.arena(limits);
    arena.map_or(usize::MAX, |arena| arena.bytes())
}

/// Bytes that requests may hold besides those of others where a model sees: the arena, one large photograph while it
/// is decoded, and rows that are kept.
pub(crate) fn memory_for(encoder: &ImageEncoder) -> u64 {
    /// Pixels of a photograph as most phones take them.
    const PHOTOGRAPH: u64 = 12_000_000;
    let shape = encoder.shape();
    let rows = shape.most_tokens() * shape.rows.row_width() * size_of::<f32>();
    let kept = rows.saturating_mul(Eyes::KEPT) as u64;
    kept + (arena_bytes(encoder, shape.most()) as u64).max(PHOTOGRAPH * 16 + (32 << 20))
}
