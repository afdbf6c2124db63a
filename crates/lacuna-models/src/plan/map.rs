//! The plan as a map: one line for each buffer, in address order.
//!
//! ```text
//! # section offset end size buffer shape element state lifetime
//! arena 0x000000000000 0x000000200000 2097152 hidden 512x1024 f32 committed embed..choose
//! kv 0x000000b50000 0x000001950000 14680064 sequence-0.layer-0.k 7168x1x8x128 f16 virtual -
//! ```
//!
//! Sections follow each other: the arena, whose buffers share bytes as their lifetimes end, then KV
//! caches (tokens x layers x heads x elements), each buffer at a page, then weights in file order. `virtual` is address space that
//! memory comes to as it is used, `committed` is memory from the start.

use std::fmt::{self, Display, Formatter};

use lacuna_kv::{BufferRows, Geometry, KvPolicy};

use crate::plan::{ALIGNMENT, KvBuffer, KvRows, Plan};

/// A [`Plan`] written as a map.
#[derive(Debug, Clone, Copy)]
pub struct Map<'a>(&'a Plan);

impl Plan {
    /// The plan as a map: a line for each buffer, under a line that names the columns.
    #[must_use]
    pub fn map(&self) -> Map<'_> {
        Map(self)
    }
}

/// One line.
struct Line<'a> {
    section: &'static str,
    offset: u64,
    size: u64,
    buffer: &'a str,
    shape: String,
    element: &'a str,
    state: &'static str,
    lifetime: String,
}

impl Display for Line<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self {
            section,
            offset,
            size,
            buffer,
            shape,
            element,
            state,
            lifetime,
        } = self;
        let end = offset + size;
        writeln!(
            f,
            "{section} {offset:#014x} {end:#014x} {size} {buffer} {shape} {element} {state} {lifetime}"
        )
    }
}

impl Display for Map<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "# section offset end size buffer shape element state lifetime"
        )?;
        self.arena(f)?;
        let kv = self.kv(f)?;
        self.weights(f, kv)
    }
}

impl Map<'_> {
    fn arena(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut places: Vec<_> = self.0.arena.placements().iter().collect();
        places.sort_by_key(|place| (place.offset, place.slot));
        for place in places {
            let (first, last) = place.steps;
            let line = Line {
                section: "arena",
                offset: place.offset as u64,
                size: place.bytes as u64,
                buffer: place.name,
                shape: dimensions(&[place.shape.rows, place.shape.width]),
                element: place.shape.element.name(),
                state: "committed",
                lifetime: format!("{first}..{last}"),
            };
            line.fmt(f)?;
        }
        Ok(())
    }

    /// Returns where the section ends.
    fn kv(&self, f: &mut Formatter<'_>) -> Result<u64, fmt::Error> {
        let kv = &self.0.kv;
        let state = match kv.policy {
            KvPolicy::Sparse(_) | KvPolicy::Grow(_) | KvPolicy::Paged { .. } => "virtual",
            KvPolicy::Dense(_) => "committed",
        };
        let mut offset = (self.0.arena.bytes() as u64).next_multiple_of(kv.page_size.bytes());
        let buffers = kv.buffers();
        for sequence in 0..kv.sequences {
            for buffer in &buffers {
                let line = Line {
                    section: "kv",
                    offset,
                    size: buffer.bytes,
                    buffer: &label(sequence, &buffer.rows),
                    shape: dimensions(&shape(&kv.geometry, buffer)),
                    element: &element(&kv.geometry, &buffer.rows),
                    state,
                    lifetime: "-".to_owned(),
                };
                line.fmt(f)?;
                offset += buffer.bytes;
            }
        }
        Ok(offset)
    }

    fn weights(&self, f: &mut Formatter<'_>, start: u64) -> fmt::Result {
        let mut offset = start;
        for tensor in &self.0.weights.tensors {
            let line = Line {
                section: "weights",
                offset,
                size: tensor.bytes as u64,
                buffer: &tensor.name,
                shape: dimensions(&tensor.shape),
                element: &tensor.type_name,
                state: match tensor.converted_from {
                    None => "virtual",
                    Some(_) => "committed",
                },
                lifetime: "-".to_owned(),
            };
            line.fmt(f)?;
            offset = (offset + tensor.bytes as u64).next_multiple_of(ALIGNMENT as u64);
        }
        Ok(())
    }
}

/// `sequence-0.layers-4-7.k` or `sequence-0.block-12`: whose rows a buffer holds.
fn label(sequence: usize, rows: &KvRows) -> String {
    let rows = match rows {
        KvRows::Block(index) => format!("block-{index}"),
        KvRows::States => "states".to_owned(),
        KvRows::Side(BufferRows {
            layer,
            layers,
            side,
            ..
        }) => {
            let first = layer.0;
            let layers = match layers {
                1 => format!("layer-{first}"),
                more => format!("layers-{first}-{}", first + more - 1),
            };
            format!("{layers}.{}", side.to_string().to_lowercase())
        }
    };
    format!("sequence-{sequence}.{rows}")
}

/// Tokens x layers x heads x elements; of a block, whose layers may differ, tokens x elements; of states,
/// elements.
fn shape(geometry: &Geometry, buffer: &KvBuffer) -> Vec<usize> {
    match &buffer.rows {
        KvRows::Side(held) => {
            let (heads, elements) = (held.rows.kv_heads, held.rows.head_dim(held.side));
            vec![buffer.tokens, held.layers, heads, elements]
        }
        KvRows::Block(_) => vec![buffer.tokens, geometry.elements_per_token()],
        KvRows::States => vec![geometry.state_bytes() / size_of::<f32>()],
    }
}

fn element(geometry: &Geometry, rows: &KvRows) -> String {
    match rows {
        KvRows::Side(held) => geometry.element(held.side).name().to_owned(),
        KvRows::Block(_) => geometry.elements().to_string(),
        KvRows::States => "f32".to_owned(),
    }
}

fn dimensions(shape: &[usize]) -> String {
    let dims: Vec<String> = shape.iter().map(ToString::to_string).collect();
    dims.join("x")
}
