//! Images of prompts: files become pictures, one or several of each, and pictures rows for the model, each picture once for
//! all that show it.
//!
//! A picture's tokens are numbers made of its name, so all that finds computed tokens again finds computed pictures:
//! the prefix cache, within and across requests, and folders of it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use lacuna_images::{Filter, Header, Limits, Name, Picture, Tiling};
use lacuna_kernels::{Cpu, CpuConfig};
use lacuna_models::spec::{Grid, ImageTooLong, Resampling};
use lacuna_models::{
    BatchLimits, ForwardError, ImageEncoder, ImageShape, ImageTokens, Model, OutOfMemory,
    PromptError, Scratch, Shown,
};

use crate::request_memory::{HeldMemory, MemoryRefusal, RequestMemory};

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
    /// One of several images that is no image that can be had, or of such a shape.
    #[error("image {number} of {count}: {error}")]
    One {
        /// Which it is, from one on.
        number: usize,
        /// How many there are.
        count: usize,
        /// What is wrong with it.
        error: Box<Self>,
    },
    /// More images than may be sent at once.
    #[error("{given} images are given; at most {limit} are taken at once")]
    TooMany {
        /// How many there are.
        given: usize,
        /// How many there may be.
        limit: usize,
    },
    /// Images that take more tokens than the context holds.
    #[error(
        "the prompt has {prompt} tokens or more with its images, but the context holds {context}; make the context longer, or show fewer \
         or smaller images"
    )]
    TooManyTokens {
        /// Tokens of the prompt at least: those between pictures are not counted.
        prompt: usize,
        /// Tokens the context holds.
        context: usize,
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

impl ImageError {
    /// The same about the image at `index`, where there are several and it is about one.
    #[must_use]
    pub fn of_one(self, index: usize, count: usize) -> Self {
        match self {
            Self::File(_) | Self::Shape(_) if count > 1 => Self::One {
                number: index + 1,
                count,
                error: Box::new(self),
            },
            other => other,
        }
    }
}

/// What an image of some size comes to for an encoder.
#[derive(Debug, Clone, Copy)]
pub struct ImagePlan {
    /// Its tiles, each of which is a picture beside the whole; none where that is all there is.
    pub tiles: Grid,
    /// Patches of each of its pictures.
    pub patches: Grid,
    /// Tokens of each of its pictures.
    pub tokens: Grid,
    /// How many runs of tokens each of its pictures is, and the grid of each: one, or one for each row.
    runs: (usize, Grid),
    /// Pixels of the width and of the height of each.
    size: [usize; 2],
    tiling: Option<Tiling>,
    filter: Filter,
}

impl ImagePlan {
    /// Of an image of so many pixels of width and of height.
    ///
    /// # Errors
    /// [`ImageTooLong`].
    pub fn new(shape: &ImageShape, given: [usize; 2]) -> Result<Self, ImageTooLong> {
        let size = shape.fit(given)?;
        let filter = match shape.patches.resampling {
            Resampling::Bilinear => Filter::Triangle,
            Resampling::Bicubic => Filter::Cubic,
            Resampling::Lanczos => Filter::Lanczos,
        };
        let tiled = shape.tiled(given);
        let tiling = tiled.map(|sizes| Tiling {
            resized: sizes.resized,
            stretched: sizes.stretched,
            side: sizes.side,
            seen: size[0],
            filter,
        });
        let patches = shape.grid(size);
        let tokens = shape.tokens(patches);
        Ok(Self {
            tiles: tiled.map_or(Grid::NONE, |sizes| sizes.tiles),
            patches,
            tokens,
            runs: shape.runs(tokens),
            size,
            tiling,
            filter,
        })
    }

    /// Pictures that it becomes.
    #[must_use]
    pub const fn pictures(&self) -> usize {
        self.tiles.count() + 1
    }

    /// Bytes of memory that making them of a file takes at most.
    #[must_use]
    pub fn preprocessing_bytes(&self, header: &Header) -> u64 {
        match self.tiling {
            None => header.preprocessing_bytes(self.size),
            Some(tiling) => tiling.preprocessing_bytes(header),
        }
    }

    /// Numbers that stand for no picture in its places.
    fn stand_ins(&self) -> ImageTokens {
        let (runs, run) = self.runs;
        ImageTokens {
            tiles: self.tiles,
            pictures: vec![vec![0; run.count()]; self.pictures() * runs],
        }
    }

    /// The tokens of `pictures`, which [`ImagePlan::pictures_of`] gave.
    fn tokens_of(&self, pictures: &[Picture]) -> ImageTokens {
        let Grid { rows, columns } = self.tokens;
        let (_, run) = self.runs;
        let runs = pictures.iter().flat_map(|picture| {
            let tokens = picture.name().tokens([rows, columns]);
            let runs = tokens.chunks(run.count()).map(<[u32]>::to_vec);
            runs.collect::<Vec<_>>()
        });
        ImageTokens {
            tiles: self.tiles,
            pictures: runs.collect(),
        }
    }

    fn pictures_of(&self, image: &lacuna_images::Image) -> Vec<Picture> {
        match self.tiling {
            None => vec![Picture::of(image, self.size, self.filter)],
            Some(tiling) => tiling.pictures(image),
        }
    }
}

/// What encodes the images of a model's prompts, and the rows of the last of them.
///
/// Encoding takes the arena of a pass while it lasts, and one picture is encoded at a time.
#[derive(Debug)]
pub struct Eyes {
    model: Arc<Model>,
    cpu: CpuConfig,
    limits: Limits,
    /// What memory is taken from; none for whoever has no requests.
    memory: Option<RequestMemory>,
    /// Tokens that a prompt may have.
    context_tokens: usize,
    kept: Mutex<Kept>,
}

/// The rows of a picture, run by run of its tokens.
type Rows = Vec<Arc<[f32]>>;

/// Rows of pictures, those shown last behind the others.
#[derive(Debug, Default)]
struct Kept {
    pictures: VecDeque<(Name, Rows)>,
    encoded: u64,
}

impl Kept {
    /// The rows of a picture, if they are kept: for a while again.
    fn find(&mut self, name: Name) -> Option<Rows> {
        let known = |(known, _): &(Name, _)| *known == name;
        let place = self.pictures.iter().position(known)?;
        let found = self.pictures.remove(place)?;
        let rows = found.1.clone();
        self.pictures.push_back(found);
        Some(rows)
    }

    /// Keeps them, and of all pictures no more than `most`.
    fn keep(&mut self, name: Name, rows: Rows, most: usize) {
        self.encoded += 1;
        if self.pictures.len() >= most {
            self.pictures.pop_front();
        }
        self.pictures.push_back((name, rows));
    }
}

/// An image that has been looked at.
struct Seen {
    tokens: ImageTokens,
    /// Rows and columns of each run of them.
    grid: Grid,
    /// The rows of each.
    rows: Rows,
}

impl Eyes {
    /// Images of a prompt at most: each takes hundreds of tokens.
    pub const MOST_IMAGES: usize = 64;
    /// Images whose rows are kept beside those that requests show, if they have as many pictures as any.
    const KEPT: usize = 8;

    /// For the prompts of `model`, by `cpu`, and with memory of `memory`.
    #[must_use]
    pub fn new(model: Arc<Model>, cpu: CpuConfig, memory: Option<RequestMemory>) -> Self {
        Self {
            context_tokens: model.spec().context_tokens,
            model,
            cpu,
            limits: Limits::default(),
            memory,
            kept: Mutex::default(),
        }
    }

    /// The same for prompts that are to fit a context of so many tokens, which may be fewer than the model was made for.
    #[must_use]
    pub fn within(self, context_tokens: usize) -> Self {
        Self {
            context_tokens,
            ..self
        }
    }

    /// Reads image `files`, puts them in their places among the tokens of a rendered conversation and encodes those that
    /// are not known. Returns what the prompt shows, picture by picture.
    ///
    /// # Errors
    /// [`ImageError`]: of damaged and enormous files, places that are not as many, more tokens than the context holds, and
    /// memory that is not free.
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
        self.check_places(tokens, files)?;
        let seen = files.iter().enumerate().map(|(index, file)| {
            let seen = self.see(encoder, file.as_ref());
            seen.map_err(|error| error.of_one(index, files.len()))
        });
        let seen = seen.collect::<Result<Vec<_>, _>>()?;
        let (images, rows): (Vec<_>, Vec<_>) = seen
            .into_iter()
            .map(|seen| (seen.tokens, (seen.grid, seen.rows)))
            .unzip();
        let places = self.model.place_images(tokens, &images)?;
        let pictures = rows
            .into_iter()
            .flat_map(|(grid, rows)| rows.into_iter().map(move |rows| (grid, rows)));
        let shown = places.into_iter().zip(pictures);
        Ok(shown
            .map(|(positions, (grid, rows))| Shown {
                positions,
                grid,
                rows,
            })
            .collect())
    }

    /// Whether there are as many places as images, and room in the context, before any is decoded: encoding takes long.
    fn check_places(&self, tokens: &[u32], files: &[impl AsRef<[u8]>]) -> Result<(), ImageError> {
        let mut places = tokens.to_vec();
        let one = vec![ImageTokens::one(vec![0]); files.len()];
        self.model.place_images(&mut places, &one)?;
        // A mark may be replaced. What is between pictures depends on how an image is turned, which its header does not say.
        let mut prompt = tokens.len().saturating_sub(files.len());
        for (index, file) in files.iter().enumerate() {
            let stand_ins = self.stand_ins(file.as_ref());
            let pictures = stand_ins
                .map_err(|error| error.of_one(index, files.len()))?
                .pictures;
            prompt += pictures.iter().map(Vec::len).sum::<usize>();
        }
        let context = self.context_tokens;
        match prompt > context {
            true => Err(ImageError::TooManyTokens { prompt, context }),
            false => Ok(()),
        }
    }

    /// As many tokens as stand for an image, by the header of its file.
    ///
    /// # Errors
    /// [`ImageError`]: of a file that is no image that can be had.
    pub fn stand_ins(&self, file: &[u8]) -> Result<ImageTokens, ImageError> {
        let encoder = self.model.images().ok_or(ImageError::NoEyes)?;
        let header = Header::read(file, &self.limits)?;
        let plan = ImagePlan::new(encoder.shape(), size_of_file(&header))?;
        Ok(plan.stand_ins())
    }

    /// As many tokens as stand for the largest image.
    ///
    /// # Errors
    /// [`ImageError::NoEyes`].
    pub fn most_stand_ins(&self) -> Result<ImageTokens, ImageError> {
        let shape = self.model.images().ok_or(ImageError::NoEyes)?.shape();
        let tiles = shape.most_tiles();
        let (runs, run) = shape.runs(shape.most_grid());
        Ok(ImageTokens {
            tiles,
            pictures: vec![vec![0; run.count()]; (tiles.count() + 1) * runs],
        })
    }

    /// Pictures that have been encoded.
    #[must_use]
    pub fn encoded(&self) -> u64 {
        self.kept
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .encoded
    }

    /// Makes pictures of a file, and rows of those.
    fn see(&self, encoder: &ImageEncoder, file: &[u8]) -> Result<Seen, ImageError> {
        let (plan, pictures) = self.pictures(encoder, file)?;
        // One image's at a time are held.
        let pixels = pictures.iter().map(|picture| picture.pixels().len()).sum();
        let _held = self.take(pixels)?;
        let rows = self.rows(encoder, &plan, &pictures)?;
        Ok(Seen {
            tokens: plan.tokens_of(&pictures),
            grid: plan.runs.1,
            rows: rows.concat(),
        })
    }

    /// Decodes a file whose header says no more than is allowed, in memory that is taken for it.
    fn pictures(
        &self,
        encoder: &ImageEncoder,
        file: &[u8],
    ) -> Result<(ImagePlan, Vec<Picture>), ImageError> {
        let header = Header::read(file, &self.limits)?;
        let plan = ImagePlan::new(encoder.shape(), size_of_file(&header))?;
        let _held = self.take(plan.preprocessing_bytes(&header) as usize)?;
        let image = header.decode(file)?;
        // It may have been turned, and then sizes fit otherwise.
        let plan = ImagePlan::new(encoder.shape(), [image.width(), image.height()])?;
        let pictures = plan.pictures_of(&image);
        Ok((plan, pictures))
    }

    /// Memory of requests, where there is an account of it.
    fn take(&self, bytes: usize) -> Result<Option<HeldMemory>, ImageError> {
        let memory = self.memory.as_ref();
        Ok(memory.map(|it| it.try_take(bytes)).transpose()?)
    }

    /// The rows of each of an image's pictures, which are encoded unless they are known.
    fn rows(
        &self,
        encoder: &ImageEncoder,
        plan: &ImagePlan,
        pictures: &[Picture],
    ) -> Result<Vec<Rows>, ImageError> {
        let (patches, (runs, _)) = (plan.patches, plan.runs);
        // Held while they are encoded: those who show the same wait for them, and there is one arena.
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let most = Self::KEPT * (encoder.shape().most_tiles().count() + 1);
        let mut pass = None;
        let rows = pictures.iter().map(|picture| {
            if let Some(rows) = kept.find(picture.name()) {
                return Ok(rows);
            }
            let (cpu, scratch, _) = match &mut pass {
                Some(pass) => pass,
                None => pass.insert(self.begin(encoder, patches)?),
            };
            let rows = encoder.encode(cpu, (picture.pixels(), patches), scratch)?;
            let runs = rows.chunks(rows.len() / runs).map(Arc::from);
            let rows: Rows = runs.collect();
            kept.keep(picture.name(), rows.clone(), most);
            Ok(rows)
        });
        rows.collect()
    }

    /// What passes over pictures of these patches take.
    fn begin(
        &self,
        encoder: &ImageEncoder,
        patches: Grid,
    ) -> Result<(Cpu, Scratch, Option<HeldMemory>), ImageError> {
        let limits = encoder.shape().limits(patches);
        let bytes = arena_bytes(encoder, limits);
        let held = self.take(bytes)?;
        let arena = encoder.arena(limits).map_err(|_| OutOfMemory { bytes })?;
        let scratch = Scratch::new(encoder.program(), arena)?;
        let cpu = Cpu::new(self.cpu).map_err(|error| ImageError::Cpu(error.to_string()))?;
        Ok((cpu, scratch, held))
    }
}

/// Pixels of the width and of the height that a file says.
fn size_of_file(header: &Header) -> [usize; 2] {
    [header.width, header.height].map(|side| side as usize)
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
    let picture = shape.most_tokens() * shape.rows.row_width() * size_of::<f32>();
    let rows = picture.saturating_mul(shape.most_tiles().count() + 1);
    let kept = rows.saturating_mul(Eyes::KEPT) as u64;
    kept + (arena_bytes(encoder, shape.most()) as u64).max(PHOTOGRAPH * 16 + (32 << 20))
}
