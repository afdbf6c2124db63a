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
            // Only tiles of one token hold rows of several layers.
            offset: (layer.0 % together) * row,
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

    /// Tokens whose rows lie wholly in the first `bytes` of the buffer.
    pub(crate) fn tokens_within(self, bytes: usize) -> usize {
        bytes / self.bytes * self.tokens
    }

    /// Bytes from the start of the buffer that hold every row before `token`.
    pub(crate) fn bytes_through(self, token: usize) -> usize {
        token.div_ceil(self.tokens) * self.bytes
    }

    /// Bytes of whole pages that the buffer at `index` of `count` has memory for when `tokens` tokens
    /// have come one at a time: those its rows need, and the next one if its turn has come.
    ///
    /// While a page fills, the next page of one buffer after another is mapped, so that a token that
    /// begins a page asks for no more pages than the tokens before it. Unfilled and mapped ahead
    /// together are less than a page a buffer.
    pub(crate) fn mapped_bytes(
        self,
        tokens: usize,
        page_bytes: usize,
        index: usize,
        count: usize,
    ) -> usize {
        let needed = self.bytes_through(tokens).next_multiple_of(page_bytes);
        let before_last = tokens.saturating_sub(1) * self.bytes / self.tokens;
        let filled = before_last.saturating_sub(needed.saturating_sub(page_bytes));
        match index < count * filled / page_bytes {
            true => needed + page_bytes,
            false => needed,
        }
    }
}

#[cfg(test)]
mod tests {
    use lacuna_kernels::ElementType;

    use super::*;

    #[test]
    fn heads_of_sixteen_tokens_lie_together_and_so_do_layers() {
        let geometry = Geometry {
            layers: 5,
            kv_heads: 2,
            head_dim: 32,
            key_element: ElementType::F32,
            value_element: ElementType::F16,
        };
        let tiles = |layout: Layout| {
            let tiles = layout.tiles(&geometry);
            tiles
                .map(|tiles| (tiles.tokens, tiles.bytes))
                .collect::<Vec<_>>()
        };
        assert_eq!(tiles(Layout::TokenMajor), [(1, 256), (1, 128)].repeat(5));
        assert_eq!(
            tiles(Layout::HeadMajor),
            [(16, 16 * 256), (16, 16 * 128)].repeat(5)
        );
        let two = Layout::Interleaved(NonZeroUsize::new(2).expect("two"));
        let mut pairs = [(1, 512), (1, 256)].repeat(2);
        pairs.extend([(1, 256), (1, 128)]);
        assert_eq!(tiles(two), pairs, "the last layer is alone");
        let place = two.place(&geometry, Layer(3), Side::Value);
        assert_eq!((place.buffer, place.offset), (3, 128));
        let place = Layout::HeadMajor.place(&geometry, Layer(3), Side::Value);
        assert_eq!((place.buffer, place.offset), (7, 0));
    }

    #[test]
    fn buffers_are_named_by_their_first_layer_and_side() {
        let names = |layout: Layout| [0, 1, 2, 5].map(|index| layout.label(index));
        let each = ["layer 0 K", "layer 0 V", "layer 1 K", "layer 2 V"];
        assert_eq!(names(Layout::TokenMajor), each);
        let four = Layout::Interleaved(NonZeroUsize::new(4).expect("four"));
        let fours = ["layer 0 K", "layer 0 V", "layer 4 K", "layer 8 V"];
        assert_eq!(names(four), fours);
    }
}
