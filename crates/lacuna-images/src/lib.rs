//! Images as encoders take them: decoded within [`Limits`], resized to the pixel as the reference implementation does,
//! and named by what came of it.
//!
//! Nothing is decoded before its header has been looked at: [`Header::read`] costs the header alone, and says what
//! decoding takes. A [`Picture`] is what a model sees of an image: two files with the same pixels after preprocessing
//! are the same picture. Where a model takes large images in tiles, each tile is a picture ([`Tiling`]).
//!
//! ```
//! use lacuna_images::{Filter, Header, Limits, Picture};
//!
//! // A GIF of one pixel.
//! let file = b"GIF89a\x01\0\x01\0\x80\0\0\xff\0\0\0\0\0,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;";
//! let header = Header::read(file, &Limits::default())?;
//! assert_eq!((header.width, header.height), (1, 1));
//! let picture = Picture::of(&header.decode(file)?, [4, 4], Filter::Triangle);
//! assert_eq!(picture.pixels()[..3], [255, 0, 0]);
//! # Ok::<(), lacuna_images::Error>(())
//! ```

#![forbid(unsafe_code)]

mod decode;
mod picture;
mod png;
mod resize;
mod tiles;
mod webp;

pub use decode::{Error, Format, Header, Image, Limits};
pub use picture::{FIRST_TOKEN, Name, Picture, pictures_in};
pub use resize::{Filter, resize};
pub use tiles::Tiling;
