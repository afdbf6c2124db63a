//! What images of a prompt take, before they are sent.

use std::path::Path;

use anyhow::{Context, Result};
use lacuna::ModelSpec;
use lacuna::plan::ArenaPlan;
use lacuna_engine::{ImageFormat, ImageHeader, ImageLimits};
use lacuna_kv::Geometry;
use lacuna_models::ImageShape;
use lacuna_models::program::Program;
use serde::Serialize;

#[derive(Serialize)]
pub(super) struct Images {
    /// The family of the encoder.
    pub(super) encoder: &'static str,
    /// Memory for the pass over an image, of which there is one at a time.
    pub(super) arena_bytes: usize,
    /// In the places of tokens, of all images together; marks around them are beside these.
    pub(super) tokens: usize,
    pub(super) kv_bytes: usize,
    pub(super) images: Vec<Image>,
}

#[derive(Serialize)]
pub(super) struct Image {
    /// As it was given.
    pub(super) image: String,
    pub(super) width: u32,
    pub(super) height: u32,
    /// Memory at most until it is a picture as the encoder takes it.
    pub(super) preprocessing_bytes: u64,
    pub(super) patches: usize,
    pub(super) tokens: usize,
    pub(super) kv_bytes: usize,
}

impl Images {
    /// Of files or sizes, for the encoder `eyes` and a decoder with KV of this geometry.
    pub(super) fn new(given: &[String], eyes: &ModelSpec, kv: &Geometry) -> Result<Self> {
        let shape = ImageShape::of(eyes).context("the encoder makes no rows of images")?;
        let arena = ArenaPlan::new(&Program::new(eyes), shape.limits())?;
        let kv_bytes = shape.tokens() * kv.bytes_per_token();
        let image = |given: &String| -> Result<Image> {
            let header = header(given)?;
            Ok(Image {
                image: given.clone(),
                width: header.width,
                height: header.height,
                preprocessing_bytes: header.preprocessing_bytes(shape.patches.image_side()),
                patches: shape.patches.count(),
                tokens: shape.tokens(),
                kv_bytes,
            })
        };
        Ok(Self {
            encoder: eyes.family,
            arena_bytes: arena.bytes(),
            tokens: given.len() * shape.tokens(),
            kv_bytes: given.len() * kv_bytes,
            images: given.iter().map(image).collect::<Result<_>>()?,
        })
    }
}

/// That of a file, or of no file but a size, such as 4032x3024.
fn header(given: &str) -> Result<ImageHeader> {
    let limits = ImageLimits::default();
    let size = given.split_once('x').and_then(|(width, height)| {
        let size = [width.parse().ok()?, height.parse().ok()?];
        (!Path::new(given).exists()).then_some(size)
    });
    let header = match size {
        Some(size) => ImageHeader::of(ImageFormat::Png, size, &limits),
        None => {
            let file = std::fs::read(given);
            let file = file.with_context(|| format!("cannot read the image `{given}`"))?;
            ImageHeader::read(&file, &limits)
        }
    };
    header.with_context(|| format!("`{given}` is no image that is taken"))
}
