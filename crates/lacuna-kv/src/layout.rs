//! How rows lie in a buffer. Pure.
//!
//! A buffer is a row of *tiles*; a tile holds some tokens of some layers of one side:
//!
//! ```text
//! token-major      tile = 1 token  of 1 layer:   [ row ]
//! interleaved = 4  tile = 1 token  of 4 layers:  [ row of layer 0 | of layer 1 | of 2 | of 3 ]
//! head-major       tile = 16 tokens of 1 layer:  [ head 0: 16 rows | head 1: 16 rows | ... ]
//! ```
//!
//! Tiles follow each other without gaps, so a buffer's bytes are contiguous in all of them and a
//! page boundary may fall anywhere.

use std::num::NonZeroUsize;

use crate::geometry::{Geometry, Layer, Side};

/// How rows lie in address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Layout {
    /// One buffer per layer and side, token after token.
    #[default]
    TokenMajor,
    /// One buffer per layer and side; of every 16 tokens, the rows of one head lie together.
    HeadMajor,
    /// One buffer per side for each group of this many layers, token after token, the rows of the
    /// group side by side. The smallest step a sequence grows by is then smaller by that factor,
    /// which large pages need.
    Interleaved(NonZeroUsize),
}

impl Layout {
    /// Tokens of a head-major tile: as many as a page is chosen to hold at least.
    const HEAD_MAJOR_TOKENS: usize = Geometry::MIN_ROWS_PER_PAGE;

    /// Layers whose rows lie side by side in one buffer.
    #[must_use]
    pub fn layers_together(self) -> usize {
        match self {
            Self::TokenMajor | Self::HeadMajor => 1,
            Self::Interleaved(layers) => layers.get(),
        }
    }

    /// Tokens of one tile: memory is put behind whole tiles.
    #[must_use]
    pub fn tile_tokens(self) -> usize {
        match self {
            Self::TokenMajor | Self::Interleaved(_) => 1,
            Self::HeadMajor => Self::HEAD_MAJOR_TOKENS,
        }
    }

    /// The buffers a sequence of `geometry` has, in storage order: the bytes of a tile of each.
    pub(crate) fn tiles(self, geometry: &Geometry) -> impl Iterator<Item = Tiles> {
        let (together, tokens) = (self.layers_together(), self.tile_tokens());
        let geometry = *geometry;
        (0..geometry.layers)
            .step_by(together)
            .flat_map(move |first| {
                let layers = together.min(geometry.layers - first);
                Side::BOTH.map(|side| Tiles {
                    tokens,
                    bytes: tokens * layers * geometry.row_bytes(side),
                })
            })
    }

    /// What the buffer at `index` of [`Layout::tiles`] is called in debug output.
    pub(crate) fn label(self, index: usize) -> String {
        let layer = index / 2 * self.layers_together();
        format!("layer {layer} {}", Side::BOTH[index % 2])
    }

    /// Where the rows of one side of one layer are.
    pub(crate) fn place(self, geometry: &Geometry, layer: Layer, side: Side) -> Place {
        let together = self.layers_together();
        let row = geometry.row_bytes(side);
        Place {
            buffer: 2 * (layer.0 / together) + usize::from(side == Side::Value),
            offset: (layer.0 % together) * self.tile_tokens() * row,
        }
    }
}

/// Which buffer has a layer's rows, and where they begin in each of its tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) buffer: usize,
    pub(crate) offset: usize,
}

/// The tiles of one buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tiles {
    pub(crate) tokens: usize,
    pub(crate) bytes: usize,
}

impl Tiles {
    /// Bytes from the start of the buffer that hold nothing but rows before `token`.
    pub(crate) fn bytes_before(self, token: usize) -> usize {
        token / self.tokens * self.bytes
    }

    /// Bytes from the start of the buffer that hold every row before `token`.
    pub(crate) fn bytes_through(self, token: usize) -> usize {
        token.div_ceil(self.tokens) * self.bytes
    }

    /// Tokens whose rows lie wholly in the first `bytes` of the buffer.
    pub(crate) fn tokens_within(self, bytes: usize) -> usize {
        bytes / self.bytes * self.tokens
    }

    /// Tokens before the first one that has no byte among the first `bytes` of the buffer.
    pub(crate) fn tokens_touching(self, bytes: usize) -> usize {
        bytes.div_ceil(self.bytes) * self.tokens
    }
}
