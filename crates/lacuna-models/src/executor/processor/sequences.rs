//! What the tokens of a pass attend to: rows of sequences, those that several have in the same memory once, or rows of the
//! pass itself.

use std::ops::Range;

use lacuna_kernels::{AttentionShape, Cached, ElementType, Sequences, SharedRows, View};
use lacuna_kv::{Layer, Side};

use crate::executor::{Segment, Texts};

/// Segments of one token each that begin with rows in the same memory of a layer.
///
/// A segment joins the first group that saves more with it than without: what is saved is the rows that all have in
/// common, once for each but the first.
pub(super) fn groups(segments: &[Segment<'_>], layer: Layer) -> Vec<SharedRows> {
    let mut groups: Vec<SharedRows> = Vec::new();
    for (index, segment) in segments.iter().enumerate() {
        if segment.tokens.len() != 1 || segment.sequence.len() < SharedRows::FEWEST {
            continue;
        }
        let rows = |group: &SharedRows| {
            let first = &segments[group.sequences[0]].sequence;
            let rows = segment.sequence.rows_in_common(first, layer);
            rows.min(group.rows)
        };
        let joins = |group: &SharedRows| {
            let (rows, members) = (rows(group), group.sequences.len());
            rows >= SharedRows::FEWEST && rows * members > group.rows * (members - 1)
        };
        match groups.iter().position(joins) {
            Some(found) => {
                groups[found].rows = rows(&groups[found]);
                groups[found].sequences.push(index);
            }
            None => groups.push(SharedRows {
                sequences: vec![index],
                rows: segment.sequence.len(),
            }),
        }
    }
    groups.retain(|group| group.sequences.len() > 1);
    groups
}

/// Rows of a layer that all of `group` have in the memory of its first.
pub(super) fn rows_in_common(segments: &[Segment<'_>], group: &[usize], layer: Layer) -> usize {
    let [first, others @ ..] = group else {
        return 0;
    };
    let first = &segments[*first].sequence;
    let rows = others
        .iter()
        .map(|index| segments[*index].sequence.rows_in_common(first, layer));
    rows.min().unwrap_or(0)
}

/// What the tokens of each segment attend to in a layer.
pub(super) struct InLayer<'a, 'b> {
    pub(super) segments: &'a [Segment<'b>],
    pub(super) layer: Layer,
    pub(super) shared: &'a [SharedRows],
    /// Parts of them, where some have images whose tokens see all of theirs; else empty.
    pub(super) runs: &'a [Run],
}

/// Tokens of a segment that are of one image, or between two.
pub(super) struct Run {
    segment: usize,
    tokens: Range<usize>,
    is_image: bool,
}

/// The tokens of `segments` in runs, if images among them are seen as a whole.
pub(super) fn runs(segments: &[Segment<'_>], images_whole: bool) -> Vec<Run> {
    let has_images = segments
        .iter()
        .any(|segment| segment.shown().next().is_some());
    if !has_images || !images_whole {
        return Vec::new();
    }
    let mut runs = Vec::new();
    for (segment, it) in segments.iter().enumerate() {
        let mut start = 0;
        let mut add = |tokens: Range<usize>, is_image| {
            if !tokens.is_empty() {
                runs.push(Run {
                    segment,
                    tokens,
                    is_image,
                });
            }
        };
        for (tokens, _) in it.shown() {
            add(start..tokens.start, false);
            add(tokens.clone(), true);
            start = tokens.end;
        }
        add(start..it.tokens.len(), false);
    }
    runs
}

impl Sequences for InLayer<'_, '_> {
    fn shared(&self) -> &[SharedRows] {
        self.shared
    }

    fn count(&self) -> usize {
        match self.runs {
            [] => self.segments.len(),
            runs => runs.len(),
        }
    }

    fn tokens(&self, index: usize) -> usize {
        match self.runs {
            [] => self.segments[index].tokens.len(),
            runs => runs[index].tokens.len(),
        }
    }

    fn cached(&self, index: usize) -> Cached<'_> {
        let run = self.runs.get(index);
        let sequence = &self.segments[run.map_or(index, |run| run.segment)].sequence;
        let (k, v) = (
            sequence.view(self.layer, Side::Key),
            sequence.view(self.layer, Side::Value),
        );
        match run {
            None => Cached {
                k,
                v,
                first_position: sequence.len(),
                // Of a head that keeps no rows the token's own is not there: it sees those that are.
                ahead: sequence.prepared() == 0,
            },
            Some(run) => {
                let end = sequence.len() + run.tokens.end;
                Cached {
                    k: k.up_to(end),
                    v: v.up_to(end),
                    first_position: sequence.len() + run.tokens.start,
                    ahead: run.is_image,
                }
            }
        }
    }
}

/// Which tokens of a pass that keeps nothing see one another.
#[derive(Clone, Copy)]
pub(super) enum Parts<'a> {
    /// Those of a text.
    Texts(&'a Texts),
    /// Those of a window of an image.
    Windows(&'a [Range<usize>]),
    /// All.
    Whole,
}

/// What the tokens of each part attend to: rows of the pass, as bytes of `f32`.
pub(super) struct Within<'a> {
    pub(super) parts: Parts<'a>,
    pub(super) tokens: usize,
    pub(super) shape: &'a AttentionShape,
    pub(super) keys: &'a [u8],
    pub(super) values: &'a [u8],
}

impl Within<'_> {
    fn range(&self, index: usize) -> Range<usize> {
        match self.parts {
            Parts::Texts(texts) => texts.range(index),
            Parts::Windows(windows) => windows[index].clone(),
            Parts::Whole => 0..self.tokens,
        }
    }
}

impl Sequences for Within<'_> {
    fn count(&self) -> usize {
        match self.parts {
            Parts::Texts(texts) => texts.len(),
            Parts::Windows(windows) => windows.len(),
            Parts::Whole => 1,
        }
    }

    fn tokens(&self, index: usize) -> usize {
        self.range(index).len()
    }

    fn cached(&self, index: usize) -> Cached<'_> {
        let rows = self.range(index);
        let heads = self.shape.kv_heads;
        let view = |bytes, head_dim| {
            let row_bytes = heads * ElementType::F32.bytes(head_dim);
            let bytes: &[u8] = bytes;
            let bytes = &bytes[rows.start * row_bytes..rows.end * row_bytes];
            View::flat(ElementType::F32, heads, head_dim, bytes)
        };
        Cached {
            k: view(self.keys, self.shape.head_dim),
            v: view(self.values, self.shape.value_dim),
            first_position: 0,
            ahead: false,
        }
    }
}
