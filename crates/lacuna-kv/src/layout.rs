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

use std::iter;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

use lacuna_kernels::RowLayout;
use lacuna_pages::PageSize;

use crate::geometry::{Geometry, Keep, Layer, RowSpec, Side};

/// How rows lie in address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Layout {
    /// One buffer per layer and stored side, token after token.
    #[default]
    TokenMajor,
    /// One buffer per layer and stored side; of every 16 tokens, the rows of one head lie together.
    HeadMajor,
    /// One buffer per stored side for each group of up to this many layers that follow each other and have
    /// rows of the same shape and use in memory of one kind, token after token, the rows of the group side by side. The
    /// smallest step a sequence grows by is then smaller by that factor, which large pages need.
    Interleaved(NonZeroUsize),
}

/// Rows a page should hold at least, so that the per-page cost of mapping is small beside the cost of
/// filling the page.
const MIN_ROWS_PER_PAGE: usize = 16;

/// Pages of a sequence's states where no layer keeps rows: sharing a state costs a mapping for each, and
/// up to one of them is slack.
const STATE_PAGES: usize = 64;

impl Layout {
    /// Tokens of a head-major tile: as many as a page is chosen to hold at least.
    const HEAD_MAJOR_TOKENS: usize = MIN_ROWS_PER_PAGE;

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

    /// The buffers a sequence of `geometry` has, in storage order.
    #[must_use]
    pub fn buffers(self, geometry: &Geometry) -> Vec<BufferRows> {
        let mut groups: Vec<(Layer, usize, RowSpec)> = Vec::new();
        for (layer, rows) in geometry.own_rows() {
            match groups.last_mut() {
                Some((first, layers, same))
                    if *same == rows
                        && layer.0 == first.0 + *layers
                        && geometry.location(layer) == geometry.location(*first)
                        && *layers < self.layers_together() =>
                {
                    *layers += 1;
                }
                _ => groups.push((layer, 1, rows)),
            }
        }
        let tokens = self.tile_tokens();
        let sides = |(layer, layers, rows): (Layer, usize, RowSpec)| {
            rows.stored_sides().iter().map(move |&side| BufferRows {
                layer,
                layers,
                side,
                rows,
                tiles: Tiles {
                    tokens,
                    bytes: tokens * layers * geometry.row_bytes(&rows, side),
                },
            })
        };
        groups.into_iter().flat_map(sides).collect()
    }
}

/// What one buffer of a sequence holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferRows {
    /// The first decoder block whose rows it holds.
    pub layer: Layer,
    /// Decoder blocks, from that one on.
    pub layers: usize,
    /// Keys or values.
    pub side: Side,
    /// The rows of each of them.
    pub rows: RowSpec,
    pub(crate) tiles: Tiles,
}

impl BufferRows {
    /// Bytes that hold `tokens` tokens, in whole tiles.
    #[must_use]
    pub fn bytes(&self, tokens: usize) -> usize {
        self.tiles.bytes_through(tokens)
    }

    /// Bytes that hold no row of the first `tokens` tokens, in order; the last range has no end.
    pub(crate) fn bytes_without_rows(&self, tokens: usize) -> impl Iterator<Item = Range<usize>> {
        let Tiles {
            tokens: together,
            bytes,
        } = self.tiles;
        let (whole, begun) = (tokens / together, tokens % together);
        // Of a tile that is not full each head has its own rest.
        let heads = if begun == 0 { 0 } else { self.rows.kv_heads };
        let head = bytes / self.rows.kv_heads.max(1);
        let rests = (0..heads).map(move |index| {
            let start = whole * bytes + index * head;
            start + begun * (head / together)..start + head
        });
        rests.chain(iter::once(self.bytes(tokens)..usize::MAX))
    }

    /// What it is called in debug output.
    pub(crate) fn label(&self) -> String {
        format!("layer {} {}", self.layer.0, self.side)
    }
}

/// Where all rows of a geometry lie in a layout: its buffers, and which of them has which layer's
/// rows. Cloning is cheap.
#[derive(Debug, Clone)]
pub(crate) struct Arrangement {
    geometry: Geometry,
    layout: Layout,
    buffers: Arc<[BufferRows]>,
    /// For each layer, the rows it reads.
    places: Arc<[Option<[Place; 2]>]>,
}

impl Arrangement {
    pub(crate) fn new(geometry: &Geometry, layout: Layout) -> Self {
        let buffers = layout.buffers(geometry);
        let place = |layer: usize, side: Side| {
            let (source, rows) = geometry.rows(Layer(layer))?;
            let stored = rows.stored_in(side);
            let holds = |held: &BufferRows| {
                let layers = held.layer.0..held.layer.0 + held.layers;
                layers.contains(&source.0) && held.side == stored
            };
            let buffer = buffers.iter().position(holds)?;
            let held = &buffers[buffer];
            let before = source.0 - held.layer.0;
            Some(Place {
                buffer,
                // Only tiles of one token hold rows of several layers.
                offset: before * geometry.row_bytes(&rows, stored),
                layout: RowLayout {
                    head_dim: rows.head_dim(side),
                    ..row_layout(geometry, &rows, stored, held.tiles)
                },
            })
        };
        let place = |layer| {
            let [key, value] = Side::BOTH.map(|side| place(layer, side));
            Some([key?, value?])
        };
        let places = (0..geometry.layers().len()).map(place).collect();
        Self {
            geometry: geometry.clone(),
            layout,
            buffers: buffers.into(),
            places,
        }
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// The buffers a sequence has, in storage order.
    pub(crate) fn buffers(&self) -> &[BufferRows] {
        &self.buffers
    }

    /// Where the rows are that one side of `layer` reads.
    ///
    /// # Panics
    /// When it reads none.
    pub(crate) fn place(&self, layer: Layer, side: Side) -> Place {
        let places = self.places.get(layer.0).copied().flatten();
        let places = places.expect("a layer that keeps rows, or reads another's");
        places[usize::from(side == Side::Value)]
    }

    /// The page size to use, of those a device offers: the smallest that holds at least 16 rows of
    /// every buffer (slack is at most one page per buffer), or the largest there is. Where there are
    /// states alone, one of which [`STATE_PAGES`] hold all.
    pub(crate) fn page_size(&self, offered: &[PageSize]) -> Option<PageSize> {
        let row = |held: &BufferRows| held.tiles.bytes / held.tiles.tokens;
        let wanted = match self.buffers.iter().map(row).max() {
            Some(longest) => (MIN_ROWS_PER_PAGE * longest) as u64,
            None => self.geometry.state_bytes().div_ceil(STATE_PAGES) as u64,
        };
        let fits = offered
            .iter()
            .copied()
            .filter(|page| page.bytes() >= wanted);
        fits.min_by_key(|page| page.bytes())
            .or_else(|| offered.iter().copied().max_by_key(|page| page.bytes()))
    }
}

/// Where the elements of a row lie in a run of a buffer of `tiles`.
fn row_layout(geometry: &Geometry, rows: &RowSpec, side: Side, tiles: Tiles) -> RowLayout {
    let (element, heads, head_dim) = (geometry.element(side), rows.kv_heads, rows.head_dim(side));
    match tiles.tokens {
        1 => RowLayout {
            row_stride: tiles.bytes,
            ..RowLayout::token_major(element, heads, head_dim)
        },
        tokens => RowLayout::head_major(element, heads, head_dim, tokens),
    }
}

/// Which buffer has a layer's rows, where they begin in each of its tiles, and where the elements of
/// a row lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) buffer: usize,
    pub(crate) offset: usize,
    pub(crate) layout: RowLayout,
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

    /// Tokens of which some row lies in the first `bytes` of the buffer.
    pub(crate) fn tokens_through(self, bytes: usize) -> usize {
        bytes.div_ceil(self.bytes) * self.tokens
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
    /// together are less than a page a buffer. Not where a window passes rows: such a buffer has an
    /// unfilled page at each end already, and takes no more for as long as there are tokens.
    pub(crate) fn mapped_bytes(
        self,
        keep: Keep,
        tokens: usize,
        page_bytes: usize,
        index: usize,
        count: usize,
    ) -> usize {
        let needed = self.bytes_through(tokens).next_multiple_of(page_bytes);
        let before_last = tokens.saturating_sub(1) * self.bytes / self.tokens;
        let filled = before_last.saturating_sub(needed.saturating_sub(page_bytes));
        match keep == Keep::All && index < count * filled / page_bytes {
            true => needed + page_bytes,
            false => needed,
        }
    }
}

#[cfg(test)]
mod tests {
    use lacuna_kernels::ElementType;

    use super::*;
    use crate::elements::KvElements;
    use crate::geometry::{LayerCache, ValueRows};

    const MIXED: KvElements = KvElements {
        key: ElementType::F32,
        value: ElementType::F16,
    };

    fn interleaved(layers: usize) -> Layout {
        Layout::Interleaved(NonZeroUsize::new(layers).expect("not zero"))
    }

    fn tiles(layout: Layout, geometry: &Geometry) -> Vec<(usize, usize)> {
        let buffers = layout.buffers(geometry).into_iter();
        buffers
            .map(|held| (held.tiles.tokens, held.tiles.bytes))
            .collect()
    }

    fn place(layout: Layout, geometry: &Geometry, layer: usize, side: Side) -> (usize, usize) {
        let place = Arrangement::new(geometry, layout).place(Layer(layer), side);
        (place.buffer, place.offset)
    }

    #[test]
    fn heads_of_sixteen_tokens_lie_together_and_so_do_layers() {
        let geometry = Geometry::uniform(5, 2, 32, MIXED);
        let tiles = |layout| tiles(layout, &geometry);
        assert_eq!(tiles(Layout::TokenMajor), [(1, 256), (1, 128)].repeat(5));
        assert_eq!(
            tiles(Layout::HeadMajor),
            [(16, 16 * 256), (16, 16 * 128)].repeat(5)
        );
        let mut pairs = [(1, 512), (1, 256)].repeat(2);
        pairs.extend([(1, 256), (1, 128)]);
        assert_eq!(tiles(interleaved(2)), pairs, "the last layer is alone");
        assert_eq!(place(interleaved(2), &geometry, 3, Side::Value), (3, 128));
        assert_eq!(place(Layout::HeadMajor, &geometry, 3, Side::Value), (7, 0));
    }

    #[test]
    fn values_that_are_part_of_keys_lie_where_those_begin() {
        let rows = RowSpec {
            kv_heads: 2,
            key_dim: 48,
            value_dim: 32,
            values: ValueRows::InKeys,
            keep: Keep::All,
        };
        let geometry = Geometry::new(vec![LayerCache::Rows(rows); 4], MIXED).expect("a model");
        for layout in [Layout::TokenMajor, Layout::HeadMajor, interleaved(4)] {
            let arrangement = Arrangement::new(&geometry, layout);
            let buffers = arrangement.buffers();
            assert_eq!(buffers.len(), 4 / layout.layers_together(), "{layout:?}");
            assert!(buffers.iter().all(|held| held.side == Side::Key));
            for layer in (0..4).map(Layer) {
                let [key, value] = Side::BOTH.map(|side| arrangement.place(layer, side));
                let head_dim = 32;
                let layout = RowLayout {
                    head_dim,
                    ..key.layout
                };
                assert_eq!(value, Place { layout, ..key });
            }
        }
    }

    /// What lies side by side is kept and given back together.
    #[test]
    fn only_neighbours_with_rows_of_the_same_shape_and_use_lie_side_by_side() {
        let rows = |kv_heads, keep| {
            LayerCache::Rows(RowSpec {
                kv_heads,
                key_dim: 32,
                value_dim: 64,
                values: ValueRows::Apart,
                keep,
            })
        };
        let window = Keep::Window(NonZeroUsize::new(8).expect("not zero"));
        let (full, windowed) = (rows(1, Keep::All), rows(1, window));
        let layers = vec![
            full,
            full,
            windowed,
            windowed,
            windowed,
            rows(2, Keep::All),
            LayerCache::None,
            rows(2, Keep::All),
            LayerCache::Of(Layer(4)),
        ];
        let geometry = Geometry::new(layers, MIXED).expect("a model");
        let groups = |layout: Layout| -> Vec<(usize, usize)> {
            let buffers = layout.buffers(&geometry).into_iter();
            let keys = buffers.filter(|held| held.side == Side::Key);
            keys.map(|held| (held.layer.0, held.layers)).collect()
        };
        assert_eq!(
            groups(interleaved(2)),
            [(0, 2), (2, 2), (4, 1), (5, 1), (7, 1)]
        );
        assert_eq!(
            groups(interleaved(9)),
            [(0, 2), (2, 3), (5, 1), (7, 1)],
            "layer 6 keeps nothing, and 7 is no neighbour of 5"
        );
        assert_eq!(
            groups(Layout::TokenMajor),
            [0, 1, 2, 3, 4, 5, 7].map(|layer| (layer, 1))
        );
        for layout in [Layout::TokenMajor, Layout::HeadMajor, interleaved(3)] {
            for side in Side::BOTH {
                let shared = place(layout, &geometry, 8, side);
                assert_eq!(shared, place(layout, &geometry, 4, side), "{layout:?}");
            }
        }
        assert_eq!(place(interleaved(3), &geometry, 8, Side::Key), (2, 2 * 128));
        assert_eq!(
            place(interleaved(3), &geometry, 8, Side::Value),
            (3, 2 * 128)
        );
    }

    #[test]
    fn buffers_are_named_by_their_first_layer_and_side() {
        let geometry = Geometry::uniform(9, 1, 32, MIXED);
        let names = |layout: Layout| {
            let buffers = layout.buffers(&geometry);
            [0, 1, 2, 5].map(|index| buffers[index].label())
        };
        let each = ["layer 0 K", "layer 0 V", "layer 1 K", "layer 2 V"];
        assert_eq!(names(Layout::TokenMajor), each);
        let fours = ["layer 0 K", "layer 0 V", "layer 4 K", "layer 8 V"];
        assert_eq!(names(interleaved(4)), fours);
    }

    #[test]
    fn pages_hold_at_least_sixteen_rows() {
        let sizes = [4 << 10, 16 << 10, 64 << 10, 256 << 10];
        let offered = sizes.map(|bytes| PageSize::new(bytes).expect("a power of two"));
        let f16 = KvElements::both(ElementType::F16);
        let chosen = |geometry: &Geometry, layout| {
            let arrangement = Arrangement::new(geometry, layout);
            arrangement.page_size(&offered).map(PageSize::bytes)
        };
        let qwen3_4b = Geometry::uniform(36, 8, 128, f16);
        let together = |layers| chosen(&qwen3_4b, interleaved(layers));
        assert_eq!(together(1), Some(64 << 10), "32 tokens a page");
        assert_eq!(together(4), Some(256 << 10), "32 tokens of four layers");
        let small = Geometry::uniform(36, 2, 64, f16);
        let token_major = |geometry| chosen(geometry, Layout::TokenMajor);
        assert_eq!(token_major(&small), Some(4 << 10), "16 tokens a page");
        assert_eq!(
            chosen(&small, Layout::HeadMajor),
            Some(4 << 10),
            "however they lie"
        );
        let wide = Geometry::uniform(36, 128, 256, f16);
        assert_eq!(token_major(&wide), Some(256 << 10), "the largest there is");
        let arrangement = Arrangement::new(&qwen3_4b, Layout::TokenMajor);
        assert_eq!(arrangement.page_size(&[]), None);
    }
}
