//! Files become pixels, if their headers say no more than is allowed.

use std::io::{BufRead, Cursor, Seek};

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageError, ImageFormat, ImageReader};

use super::{png, webp};

/// What may be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a file. Default 20 MiB.
    pub bytes: usize,
    /// Pixels of an image, which is what memory goes by: up to 16 bytes of each for a moment. Default 50 million, as
    /// many as the largest cameras of phones give.
    pub pixels: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bytes: 20 << 20,
            pixels: 50_000_000,
        }
    }
}

/// Why a file is no image that can be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// More bytes than a file may have.
    #[error("the image has {bytes} bytes; at most {limit} are taken")]
    TooManyBytes {
        /// What it has.
        bytes: usize,
        /// What it may have.
        limit: usize,
    },
    /// More pixels than an image may have, by its header; it was not decoded.
    #[error(
        "the image has {width} x {height} pixels; at most {limit} in all are taken: send a smaller one"
    )]
    TooManyPixels {
        /// Of a row.
        width: u32,
        /// Rows.
        height: u32,
        /// Pixels that it may have.
        limit: u64,
    },
    /// An image without pixels.
    #[error("the image has no pixels")]
    Empty,
    /// Bytes of another kind of file.
    #[error("this is no PNG, JPEG, WebP or GIF file")]
    UnknownFormat,
    /// A file that ends too early, or says what no such file may say.
    #[error("the {format} file is damaged: {reason}")]
    Damaged {
        /// What it began as.
        format: Format,
        /// What the decoder says.
        reason: String,
    },
    /// A kind of image that is not decoded, or memory that cannot be had for it.
    #[error("the {format} file cannot be decoded: {reason}")]
    Undecodable {
        /// What it is.
        format: Format,
        /// What the decoder says.
        reason: String,
    },
}

/// Kinds of files that are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Portable Network Graphics.
    Png,
    /// JPEG, baseline or progressive.
    Jpeg,
    /// WebP, with or without loss.
    WebP,
    /// GIF, of which the first frame is taken.
    Gif,
}

impl Format {
    const ALL: [Self; 4] = [Self::Png, Self::Jpeg, Self::WebP, Self::Gif];

    const fn decoder(self) -> ImageFormat {
        match self {
            Self::Png => ImageFormat::Png,
            Self::Jpeg => ImageFormat::Jpeg,
            Self::WebP => ImageFormat::WebP,
            Self::Gif => ImageFormat::Gif,
        }
    }

    /// That of a file that begins so, whatever anyone says it is.
    fn of(file: &[u8]) -> Option<Self> {
        let found = image::guess_format(file).ok()?;
        Self::ALL
            .into_iter()
            .find(|format| format.decoder() == found)
    }

    /// The decoder of a file, which has read the header.
    fn open(self, file: &[u8], limits: image::Limits) -> Result<Box<dyn ImageDecoder + '_>, Error> {
        self.check(file)?;
        let opened = match self {
            Self::Png => self.decoder_of(png::Needed::new(file), limits),
            Self::Jpeg | Self::WebP | Self::Gif => self.decoder_of(Cursor::new(file), limits),
        };
        opened.map_err(|error| explain(self, error))
    }

    fn decoder_of<'a>(
        self,
        file: impl BufRead + Seek + 'a,
        limits: image::Limits,
    ) -> Result<Box<dyn ImageDecoder + 'a>, ImageError> {
        let mut reader = ImageReader::with_format(file, self.decoder());
        reader.limits(limits);
        Ok(Box::new(reader.into_decoder()?))
    }

    /// Refuses a file that would have its decoder take more memory than the file calls for.
    fn check(self, file: &[u8]) -> Result<(), Error> {
        match self {
            Self::WebP => webp::check(file).map_err(|reason| Error::Damaged {
                format: self,
                reason,
            }),
            Self::Png | Self::Jpeg | Self::Gif => Ok(()),
        }
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Png => "PNG",
            Self::Jpeg => "JPEG",
            Self::WebP => "WebP",
            Self::Gif => "GIF",
        })
    }
}

/// What a file says of its image before it is decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What kind of file it is.
    pub format: Format,
    /// Pixels of a row.
    pub width: u32,
    /// Rows.
    pub height: u32,
}

impl Header {
    /// Bytes of memory that one pixel takes at most while it is decoded: four channels of 16 bits, then as many of 8
    /// and three more.
    const BYTES_OF_PIXEL: u64 = 16;
    /// Bytes of a pixel as decoders give it, at most: four channels of 16 bits.
    const BYTES_OF_DECODED_PIXEL: u64 = 8;

    /// Reads the header of `file`, and no pixel.
    ///
    /// # Errors
    /// [`Error`] for files that are larger than `limits` allow, or no images.
    pub fn read(file: &[u8], limits: &Limits) -> Result<Self, Error> {
        if file.len() > limits.bytes {
            return Err(Error::TooManyBytes {
                bytes: file.len(),
                limit: limits.bytes,
            });
        }
        let format = Format::of(file).ok_or(Error::UnknownFormat)?;
        let mut memory = image::Limits::default();
        memory.max_alloc = Some(Self::reading_bytes(file));
        let (width, height) = format.open(file, memory)?.dimensions();
        Self::of(format, [width, height], limits)
    }

    /// That of an image of this size, as [`Header::read`] has it of a file.
    ///
    /// # Errors
    /// [`Error::TooManyPixels`] and [`Error::Empty`].
    pub fn of(format: Format, [width, height]: [u32; 2], limits: &Limits) -> Result<Self, Error> {
        let pixels = u64::from(width) * u64::from(height);
        if pixels > limits.pixels {
            return Err(Error::TooManyPixels {
                width,
                height,
                limit: limits.pixels,
            });
        }
        match pixels {
            0 => Err(Error::Empty),
            _ => Ok(Self {
                format,
                width,
                height,
            }),
        }
    }

    /// Bytes of memory that reading the header of `file` takes at most. What is said about a PNG's camera is kept, in
    /// room that doubles until it fits.
    const fn reading_bytes(file: &[u8]) -> u64 {
        3 * file.len() as u64 + (1 << 20)
    }

    /// Bytes of memory that decoding takes at most.
    #[must_use]
    pub const fn decoding_bytes(&self) -> u64 {
        // Decoders have some tables and rows of their own.
        self.width as u64 * self.height as u64 * Self::BYTES_OF_PIXEL + (1 << 20)
    }

    /// Bytes that a decoder may take beside the decoded pixels. What they become afterwards is made when the decoder
    /// is gone.
    const fn beside_pixels(&self) -> u64 {
        let pixels = self.width as u64 * self.height as u64;
        self.decoding_bytes() - pixels * Self::BYTES_OF_DECODED_PIXEL
    }

    /// Bytes of memory that making a picture of at most so many pixels of a side of the file takes at most.
    #[must_use]
    pub fn preprocessing_bytes(&self, [width, height]: [usize; 2]) -> u64 {
        let longer = u64::from(self.width.max(self.height));
        // It may lie on its side, and then these are the other way round.
        let sides = [width.max(height) as u64, width.min(height) as u64];
        // Resizing has rows of the old height and the new width.
        self.decoding_bytes() + sides[0] * (longer + sides[1]) * 3
    }

    /// Decodes `file`, whose header this is: turned as it says that it is to be looked at, without transparency, of
    /// several frames the first.
    ///
    /// # Errors
    /// [`Error::Damaged`] and [`Error::Undecodable`].
    pub fn decode(&self, file: &[u8]) -> Result<Image, Error> {
        let wrong = |error| explain(self.format, error);
        let mut limits = image::Limits::default();
        limits.max_alloc = Some(self.beside_pixels());
        limits.max_image_width = Some(self.width);
        limits.max_image_height = Some(self.height);
        let mut decoder = self.format.open(file, limits)?;
        // One that cannot be read is as good as none.
        let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
        let mut decoded = DynamicImage::from_decoder(decoder).map_err(wrong)?;
        decoded.apply_orientation(orientation);
        let rgb = decoded.into_rgb8();
        Ok(Image {
            width: rgb.width() as usize,
            height: rgb.height() as usize,
            pixels: rgb.into_raw(),
        })
    }
}

fn explain(format: Format, error: ImageError) -> Error {
    let reason = error.to_string();
    match error {
        ImageError::Unsupported(_) | ImageError::Limits(_) => Error::Undecodable { format, reason },
        _ => Error::Damaged { format, reason },
    }
}

/// Decoded pixels: red, green and blue, a byte each, row by row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    width: usize,
    height: usize,
    pixels: Vec<u8>,
}

impl Image {
    /// An image of these pixels.
    ///
    /// # Panics
    /// When they are not three bytes for each of `width` times `height`, or there is none.
    #[must_use]
    pub fn new(width: usize, height: usize, pixels: Vec<u8>) -> Self {
        assert!(
            !pixels.is_empty() && pixels.len() == width * height * 3,
            "three bytes for each of {width} x {height} pixels"
        );
        Self {
            width,
            height,
            pixels,
        }
    }

    /// Pixels of a row.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Rows.
    #[must_use]
    pub fn height(&self) -> usize {
        self.height
    }

    /// Three bytes for each pixel.
    #[must_use]
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }
}
