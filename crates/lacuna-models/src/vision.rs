//! The part of a model that sees: an image becomes rows for its decoder. Nothing is kept of a pass; keys and values
//! of its layers live in the arena that the caller brings, and are gone with it.

pub(crate) mod image_prompt;

pub use image_prompt::ImageTokens;

use std::io;
use std::path::{Path, PathBuf};

use lacuna_kernels::Cpu;

use crate::error::{ConfigError, ForwardError, LoadError};
use crate::executor::{self, Batch, ImageBatch, Pass};
use crate::families::{self, Description};
use crate::model::Model;
use crate::plan::{ArenaPlan, PlanError, WeightPlan};
use crate::program::{Op, Program};
use crate::scratch::{BatchLimits, Scratch};
use crate::spec::{
    Grid, ImageAttention, ImageRows, ImageTokenBounds, ImageTooLong, ModelSpec, OutputSpec,
    Patches, TiledSizes,
};
use crate::weights::{Beside, Loading, Weights};
use lacuna_files::ModelFiles;

/// An encoder of images, loaded. Immutable: activations are passed in.
#[derive(Debug)]
pub struct ImageEncoder {
    files: ModelFiles,
    spec: ModelSpec,
    shape: ImageShape,
    program: Program,
    weights: Weights,
}

/// What an encoder takes and makes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ImageShape {
    /// How an image is cut up.
    pub patches: Patches,
    /// What becomes of the patches.
    pub rows: ImageRows,
    /// Whether tokens of the prompt stand between the rows of an image.
    pub by_row: bool,
}

impl ImageShape {
    /// That of the encoder that `spec` describes; `None` where it makes no rows of images.
    #[must_use]
    pub fn of(spec: &ModelSpec) -> Option<Self> {
        match (spec.patches, spec.output) {
            (Some(patches), OutputSpec::Image(rows)) => Some(Self {
                patches,
                rows,
                by_row: spec.images.is_some_and(|images| images.prompt.is_by_row()),
            }),
            _ => None,
        }
    }

    /// Pixels of the width and of the height that an image of so many is brought to.
    ///
    /// # Errors
    /// [`ImageTooLong`].
    pub fn fit(&self, size: [usize; 2]) -> Result<[usize; 2], ImageTooLong> {
        self.patches.fit(size)
    }

    /// The patches of an image of so many pixels of width and of height, which [`ImageShape::fit`] gave.
    #[must_use]
    pub const fn grid(&self, size: [usize; 2]) -> Grid {
        self.patches.grid(size)
    }

    /// Rows of an image of these patches, each in the place of a token.
    #[must_use]
    pub const fn tokens(&self, patches: Grid) -> Grid {
        patches.merged(self.rows.merged)
    }

    /// How many runs of tokens stand for a picture of these tokens, and the grid of each.
    #[must_use]
    pub const fn runs(&self, tokens: Grid) -> (usize, Grid) {
        match self.by_row {
            true => (tokens.rows, Grid::row(tokens.columns)),
            false => (1, tokens),
        }
    }

    /// How an image of so many pixels of width and of height is cut into several pictures, where images are.
    #[must_use]
    pub fn tiled(&self, size: [usize; 2]) -> Option<TiledSizes> {
        self.patches.tiled(size)
    }

    /// The most tiles that an image has beside the whole, or none where images are not cut.
    #[must_use]
    pub const fn most_tiles(&self) -> Grid {
        self.patches.most_tiles()
    }

    /// Tokens of a picture at most.
    #[must_use]
    pub const fn most_tokens(&self) -> usize {
        self.rows.most(&self.patches)
    }

    /// Tokens of the largest picture, in as many rows as any has.
    #[must_use]
    pub const fn most_grid(&self) -> Grid {
        self.rows.most_grid(&self.patches)
    }

    /// The batch of one image of these patches, for the plan of an arena.
    #[must_use]
    pub const fn limits(&self, patches: Grid) -> BatchLimits {
        self.limits_of(patches.count(), self.tokens(patches).count())
    }

    /// That of the largest image.
    #[must_use]
    pub const fn most(&self) -> BatchLimits {
        self.limits_of(self.patches.most(), self.most_tokens())
    }

    const fn limits_of(&self, patches: usize, tokens: usize) -> BatchLimits {
        BatchLimits {
            tokens: patches,
            logit_rows: tokens,
            context_tokens: patches,
        }
    }
}

/// What the encoder of images in `files` is, which are those of a model or of a projector beside it; `None` where
/// they have none. No weight is touched.
///
/// # Errors
/// [`LoadError::Config`] for an encoder that cannot be computed.
pub fn describe_images(files: &ModelFiles) -> Result<Option<ModelSpec>, LoadError> {
    let described = families::images(files).map(|found| found.map(|it| it.spec));
    files.check()?;
    Ok(described?)
}

/// What the encoder is that [`with_images`] gives a model of `spec`, whose files are `files`: of the file `projector` if
/// one is named, else of its own, or of the one beside them. No weight is touched.
///
/// # Errors
/// As [`with_images`], but for what only weights tell.
pub fn describe_images_for(
    files: &ModelFiles,
    spec: &ModelSpec,
    projector: Option<&Path>,
) -> Result<Option<ModelSpec>, LoadError> {
    if let Some(path) = projector {
        let found = describe_images(&ModelFiles::open(path)?)?;
        let found = found.ok_or_else(|| no_encoder(path))?;
        check_decoder(&found, spec)?;
        return Ok(Some(found));
    }
    if let Some(own) = describe_images(files)? {
        return Ok(Some(own));
    }
    let [path] = &files.projectors_beside()[..] else {
        return Ok(None);
    };
    match projector_beside(path, spec)? {
        Ok(files) => describe_images(&files),
        Err(_) => Ok(None),
    }
}

/// Why a model that takes images has nothing that makes rows of them, though there is something beside it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Blindness {
    /// A projector that is none for the model.
    #[error("`{}` beside the model is not used, so it takes no images: {reason}", path.display())]
    Projector {
        /// Where it is.
        path: PathBuf,
        /// What is wrong with it.
        reason: ConfigError,
    },
    /// Several projectors, of which none is the model's more than others.
    #[error(
        "{count} files beside the model have `mmproj` in their names, so none is used and it takes no images; name its own"
    )]
    Several {
        /// How many there are.
        count: usize,
    },
}

/// Why `model`, which [`with_images`] has left as it was, takes no images, if there is more to be said than that nothing
/// is there.
///
/// # Errors
/// [`LoadError`] for a file that cannot be read.
pub fn blindness(model: &Model) -> Result<Option<Blindness>, LoadError> {
    if model.images().is_some() {
        return Ok(None);
    }
    Ok(match &model.files().projectors_beside()[..] {
        [] => None,
        [path] => {
            let fits = projector_beside(path, model.spec())?;
            // Of a model that nothing says to take images a file beside it is no news.
            let fits = fits.err().filter(|_| model.spec().images.is_some());
            fits.map(|reason| Blindness::Projector {
                path: path.clone(),
                reason,
            })
        }
        _ if model.spec().images.is_none() => None,
        several => Some(Blindness::Several {
            count: several.len(),
        }),
    })
}

/// The projector at `path`, or why it is none for a decoder of `spec`: folders have files of several models.
///
/// # Errors
/// [`LoadError`] for a file that cannot be read, of a decoder that is known to take images.
fn projector_beside(
    path: &Path,
    spec: &ModelSpec,
) -> Result<Result<ModelFiles, ConfigError>, LoadError> {
    let read = || -> Result<ModelFiles, LoadError> {
        let files = ModelFiles::open(path)?;
        let found = describe_images(&files)?.ok_or_else(|| no_encoder(path))?;
        check_decoder(&found, spec)?;
        Ok(files)
    };
    match read() {
        Ok(files) => Ok(Ok(files)),
        Err(LoadError::Config(reason)) => Ok(Err(reason)),
        // It need not have anything to do with the model.
        Err(_) if spec.images.is_none() => Ok(Err(no_encoder(path))),
        Err(error) => Err(error),
    }
}

fn no_encoder(path: &Path) -> ConfigError {
    ConfigError::Unsupported {
        feature: format!("{}, which has no encoder of images", path.display()),
        supported: "an mmproj file of Gemma 3 or 4, SmolVLM, Pixtral, Mistral 3 or one of Qwen's vision models is",
    }
}

/// Whether rows of the encoder `images` fit a decoder of `spec`, which takes rows of images.
fn check_decoder(images: &ModelSpec, spec: &ModelSpec) -> Result<(), ConfigError> {
    let width = ImageShape::of(images).map_or(0, |shape| shape.rows.row_width());
    let input = images.images;
    // A decoder that says what it takes, or one that is silent and of a family that the encoder is made for.
    let wanted = match (spec.image_row_width(), input) {
        (Some(_), Some(input)) if spec.images != Some(input) => None,
        (Some(wanted), _) => Some(wanted),
        (None, input) => {
            let made_for = input.is_some_and(|input| input.silent.contains(&spec.family));
            made_for.then_some(spec.hidden)
        }
    };
    match wanted {
        Some(wanted) if width == wanted => Ok(()),
        Some(hidden) => Err(ConfigError::Projector { width, hidden }),
        None => Err(ConfigError::Unsupported {
            feature: format!(
                "images of the encoder {} for a model of the family {}",
                images.family, spec.family
            ),
            supported: "one that was made for it is",
        }),
    }
}

/// `model` with what makes rows of images for it: of the file `projector` if one is named, else of its own files, or of
/// the one beside them that has its name; as it is where it takes no images or there is none for it.
///
/// # Errors
/// [`LoadError`]: for a file that is named and is of no use, and for one's own part that cannot be computed.
pub fn with_images(model: Model, projector: Option<&Path>) -> Result<Model, LoadError> {
    if let Some(path) = projector {
        // Whether it is the model's own is told by its numbers, before its tensors are looked for.
        describe_images_for(model.files(), model.spec(), projector)?;
        let encoder = ImageEncoder::load(ModelFiles::open(path)?)?;
        return model.with_images(encoder.ok_or_else(|| no_encoder(path))?);
    }
    if let Some(encoder) = ImageEncoder::load(model.files().clone())? {
        return model.with_images(encoder);
    }
    let [path] = &model.files().projectors_beside()[..] else {
        return Ok(model);
    };
    // Of one that does not fit [`blindness`] says why.
    let Ok(files) = projector_beside(path, model.spec())? else {
        return Ok(model);
    };
    match ImageEncoder::load(files)? {
        Some(encoder) => model.with_images(encoder),
        None => Ok(model),
    }
}

/// Multiplications of one pass over one image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageProducts {
    /// With weights of whole numbers, by activations rounded to bytes.
    pub quantized: u64,
    /// With weights of F32, F16 and BF16.
    pub float: u64,
    /// Of queries with keys, and of scores with values.
    pub attention: u64,
}

impl ImageEncoder {
    /// A hash of every byte of the files that it is in, as [`ModelFiles::content`].
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn content(&self, folder: Option<&Path>) -> io::Result<[u8; 32]> {
        self.files.content(folder)
    }

    /// Checks and connects the encoder in `files`, which are those of a model or of a projector beside it; `None`
    /// where they have none. Weights stay in their files.
    ///
    /// # Errors
    /// [`LoadError`], naming the part that is missing, damaged or not supported.
    pub fn load(files: ModelFiles) -> Result<Option<Self>, LoadError> {
        let loaded = Self::connect(files.clone());
        files.check()?;
        loaded
    }

    fn connect(files: ModelFiles) -> Result<Option<Self>, LoadError> {
        let Some(description) = families::images(&files)? else {
            return Ok(None);
        };
        let Some(shape) = ImageShape::of(&description.spec) else {
            return Ok(None);
        };
        let program = Program::new(&description.spec);
        let weights = Self::weights(&files, &description, &program)?;
        Ok(Some(Self {
            files,
            spec: description.spec,
            shape,
            program,
            weights,
        }))
    }

    fn weights(
        files: &ModelFiles,
        description: &Description,
        program: &Program,
    ) -> Result<Weights, LoadError> {
        let plan = WeightPlan::of(files.tensors(), description);
        let nothing = &mut ();
        let loading = Loading::mapped(nothing);
        let tensors = files.tensors();
        Weights::load(
            tensors,
            Beside::default(),
            description,
            program,
            &plan,
            loading,
        )
    }

    /// The same for images of so many tokens.
    ///
    /// # Errors
    /// As [`ModelSpec::with_image_tokens`].
    pub fn with_image_tokens(self, bounds: ImageTokenBounds) -> Result<Self, ConfigError> {
        let spec = self.spec.with_image_tokens(bounds)?;
        let shape = ImageShape::of(&spec).unwrap_or(self.shape);
        Ok(Self {
            // Its tensors are the same.
            program: Program::new(&spec),
            spec,
            shape,
            ..self
        })
    }

    /// Whether its rows fit a decoder of `spec`, which takes rows of images.
    ///
    /// # Errors
    /// [`ConfigError`] for a projector of another model, and a decoder that takes no images.
    pub fn check_decoder(&self, spec: &ModelSpec) -> Result<(), ConfigError> {
        check_decoder(&self.spec, spec)
    }

    /// The encoder's layers and constants.
    #[must_use]
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// What it takes and makes.
    #[must_use]
    pub fn shape(&self) -> &ImageShape {
        &self.shape
    }

    /// The forward pass, from which the arena of a [`Scratch`] is planned.
    #[must_use]
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// What a pass over an image of these patches multiplies.
    #[must_use]
    pub fn products(&self, patches: Grid) -> ImageProducts {
        let limits = self.shape.limits(patches);
        let mut made = ImageProducts {
            quantized: 0,
            float: 0,
            attention: 0,
        };
        for (rows, tensor) in self.program.multiplied() {
            let products =
                (rows.at_most(limits) * self.program.tensors()[tensor].elements()) as u64;
            match self.weights.is_quantized(tensor) {
                true => made.quantized += products,
                false => made.float += products,
            }
        }
        let image = ImageBatch::new(&self.shape.patches, (&[], patches));
        let square = |patches: usize| (patches * patches) as u64;
        let in_windows: u64 = image.windows().iter().map(|it| square(it.len())).sum();
        let steps = self.program.steps().iter();
        for op in steps.flat_map(|step| self.program.ops(step)) {
            if let Op::AttendWithin {
                shape, windowed, ..
            } = op
            {
                let seen = match windowed {
                    true => in_windows,
                    false => square(limits.tokens),
                };
                let width = shape.query_heads * (shape.head_dim + shape.value_dim);
                made.attention += width as u64 * seen;
            }
        }
        made
    }

    /// The arena of a pass within `limits`, which [`ImageShape::limits`] says of an image.
    ///
    /// # Errors
    /// [`PlanError`] where no memory has so many bytes.
    pub fn arena(&self, limits: BatchLimits) -> Result<ArenaPlan, PlanError> {
        ArenaPlan::new(&self.program, limits)
    }

    /// Rows for the decoder of one image, `[tokens, width]`, of which `grid` are the patches and `pixels` red, green and
    /// blue of each pixel, row by row.
    ///
    /// # Errors
    /// [`ForwardError`]: before anything is computed, for another number of pixels or an arena that is too small, or
    /// because the result is of no use.
    pub fn encode<'a>(
        &self,
        cpu: &Cpu,
        (pixels, grid): (&[u8], Grid),
        scratch: &'a mut Scratch,
    ) -> Result<&'a [f32], ForwardError> {
        let ImageShape { patches, rows, .. } = &self.shape;
        let size = executor::check_image((pixels, grid), scratch, (patches, rows))?;
        let mut pass = Pass {
            weights: &self.weights,
            cpu,
            size,
            batch: Batch::Image(ImageBatch::new(patches, (pixels, grid))),
            scratch: &mut *scratch,
            stream: self.weights.stream(),
            shared: None,
            image_attention: ImageAttention::Causal,
            features: &[],
        };
        let computed = pass.run(&self.program);
        drop(pass);
        // First, because whatever a lost file's zeros led to is no news.
        self.files.check()?;
        computed?;
        let [output] = scratch.slots([self.program.output()]);
        let elements = size.logit_rows * rows.row_width();
        Ok(&bytemuck::cast_slice(output)[..elements])
    }
}
