//! One sequence's rows: K and V of every layer in buffers reserved for the whole context.
//!
//! A step is `prepare(n)`, then per layer `store` and `view`, then `accept(m)` with `m <= n`.
//! `prepare` maps everything the step will touch in one batch and does nothing when the pages are
//! already there; rows that were prepared and not accepted are overwritten by the next step.

use std::ops::Range;

use lacuna_kernels::{Cpu, View};
use lacuna_pages::device::Commitment;
use lacuna_pages::{Buffer, ByteLength, PageRange, Pages, Pool, Request};

use crate::cache::to_usize;
use crate::error::KvError;
use crate::geometry::{Geometry, Layer, Side};

/// KV cache of one sequence.
#[derive(Debug)]
pub struct Sequence {
    pool: Pool,
    geometry: Geometry,
    /// K and V of layer 0, then of layer 1, and so on.
    buffers: Vec<Buffer>,
    capacity: usize,
    accepted: usize,
    prepared: usize,
    /// Bytes from the start of every buffer that have memory behind them: whole pages.
    mapped_bytes: usize,
}

/// Bytes of one sequence, at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvReport {
    /// Bytes one token takes over all layers.
    pub bytes_per_token: usize,
    /// Address space held.
    pub reserved_bytes: usize,
    /// Memory obtained from the device for this sequence.
    pub committed_bytes: usize,
    /// Committed bytes that hold no accepted row.
    pub slack_bytes: usize,
    /// Batches of mappings sent to the device, over all sequences of the cache.
    pub map_calls: u64,
    /// What holding the whole context from the start would commit.
    pub dense_bytes: usize,
}

impl Sequence {
    pub(crate) fn new(pool: &Pool, geometry: Geometry, capacity: usize) -> Result<Self, KvError> {
        let bytes = ByteLength::new(geometry.buffer_bytes(capacity.max(1))? as u64);
        let buffers = (0..geometry.layers)
            .flat_map(|layer| Side::BOTH.map(|side| (layer, side)))
            .map(|(layer, side)| pool.reserve(bytes, format!("layer {layer} {side}")))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            pool: pool.clone(),
            geometry,
            buffers,
            capacity,
            accepted: 0,
            prepared: 0,
            mapped_bytes: 0,
        })
    }

    /// Tokens whose rows are valid.
    #[must_use]
    pub fn len(&self) -> usize {
        self.accepted
    }

    /// Whether no token has been accepted yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.accepted == 0
    }

    /// Tokens the sequence was made for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Rows ready for the step under way.
    #[must_use]
    pub fn prepared(&self) -> usize {
        self.prepared
    }

    /// Makes room for `rows` more rows in every layer, in one batch.
    ///
    /// # Errors
    /// [`KvError::ContextFull`], or [`KvError::Pages`] when memory cannot be had. Nothing has changed
    /// then.
    pub fn prepare(&mut self, rows: usize) -> Result<(), KvError> {
        if rows > self.capacity - self.accepted {
            return Err(KvError::ContextFull {
                capacity: self.capacity,
                held: self.accepted,
                requested: rows,
            });
        }
        self.map(self.accepted + rows)?;
        self.prepared = rows;
        Ok(())
    }

    /// Puts memory behind rows `0 .. end`, all buffers in one batch. Allocates nothing when it is
    /// there already, as it is for all but one step a page.
    fn map(&mut self, end: usize) -> Result<(), KvError> {
        let end_bytes = end * self.geometry.row_bytes();
        if end_bytes <= self.mapped_bytes {
            return Ok(());
        }
        let missing = self.mapped_bytes..end_bytes;
        let request = |buffer| Request::new(buffer, missing.clone());
        let mut requests: Vec<Request<'_>> = self.buffers.iter_mut().map(request).collect();
        self.pool.ensure_mapped(&mut requests)?;
        self.mapped_bytes = end_bytes.next_multiple_of(to_usize(self.pool.page_size().length()));
        Ok(())
    }

    /// Writes the prepared rows of one layer: `keys` and `values` are `[prepared, row_elements]`.
    ///
    /// # Panics
    /// When the slices are not `prepared` rows long.
    pub fn store(&mut self, cpu: &Cpu, layer: Layer, keys: &[f32], values: &[f32]) {
        let range = self.byte_range(self.accepted..self.accepted + self.prepared);
        for (side, rows) in Side::BOTH.into_iter().zip([keys, values]) {
            assert_eq!(
                rows.len(),
                self.prepared * self.geometry.row_elements(),
                "one row per prepared token"
            );
            let index = buffer_index(layer, side);
            let bytes = self.buffers[index]
                .bytes_mut(range.clone())
                .expect("prepare mapped these rows");
            cpu.store_rows(self.geometry.element, bytes, rows);
        }
    }

    /// All rows of one side of one layer, accepted and prepared, as the kernels read them.
    #[must_use]
    pub fn view(&self, layer: Layer, side: Side) -> View<'_> {
        let range = self.byte_range(0..self.accepted + self.prepared);
        let bytes = self.buffers[buffer_index(layer, side)]
            .bytes(range)
            .expect("rows up to here are mapped");
        let Geometry {
            element,
            kv_heads,
            head_dim,
            ..
        } = self.geometry;
        View::flat(element, kv_heads, head_dim, bytes)
    }

    /// Records that the first `rows` prepared rows are valid.
    ///
    /// # Panics
    /// When more rows are accepted than were prepared.
    pub fn accept(&mut self, rows: usize) {
        assert!(
            rows <= self.prepared,
            "{rows} rows accepted of {} prepared",
            self.prepared
        );
        self.accepted += rows;
        self.prepared = 0;
    }

    /// Forgets every token from `len` on and gives back the pages that held only those.
    ///
    /// # Errors
    /// [`KvError::Pages`] when the device refuses; the sequence is unchanged then.
    pub fn truncate(&mut self, len: usize) -> Result<(), KvError> {
        if len >= self.accepted {
            return Ok(());
        }
        self.unmap_from(len)?;
        self.accepted = len;
        self.prepared = 0;
        Ok(())
    }

    /// Gives back the pages that hold nothing of rows `0 .. len`, all buffers in one batch. A device
    /// that commits a whole reservation keeps it.
    fn unmap_from(&mut self, len: usize) -> Result<(), KvError> {
        let page_bytes = to_usize(self.pool.page_size().length());
        let keep_bytes = (len * self.geometry.row_bytes()).next_multiple_of(page_bytes);
        let whole = self.pool.capabilities().commitment == Commitment::WithReservation;
        if whole || keep_bytes >= self.mapped_bytes {
            return Ok(());
        }
        let page = |bytes: usize| (bytes / page_bytes) as u64;
        let gone = PageRange::of(page(keep_bytes)..page(self.mapped_bytes));
        let mut requests: Vec<Pages<'_>> = self
            .buffers
            .iter_mut()
            .map(|buffer| Pages::new(buffer, gone))
            .collect();
        self.pool.unmap(&mut requests)?;
        self.mapped_bytes = keep_bytes;
        Ok(())
    }

    /// Where this sequence's bytes are.
    #[must_use]
    pub fn report(&self) -> KvReport {
        let (mut reserved_bytes, mut committed_bytes) = (0, 0);
        for buffer in &self.buffers {
            let ledger = buffer.ledger();
            reserved_bytes += to_usize(ledger.reserved);
            committed_bytes += to_usize(ledger.mapped);
        }
        let bytes_per_token = self.geometry.bytes_per_token();
        KvReport {
            bytes_per_token,
            reserved_bytes,
            committed_bytes,
            slack_bytes: committed_bytes.saturating_sub(self.accepted * bytes_per_token),
            map_calls: self.pool.ledger().counts.batches,
            dense_bytes: self.capacity * bytes_per_token,
        }
    }

    fn byte_range(&self, rows: Range<usize>) -> Range<usize> {
        let row = self.geometry.row_bytes();
        rows.start * row..rows.end * row
    }
}

fn buffer_index(layer: Layer, side: Side) -> usize {
    2 * layer.0 + usize::from(side == Side::Value)
}
