//! What a decoding model asks of the device: 72 buffers growing by one row a token, all of them in
//! one call.
//!
//! Map calls and kernel mappings are counted over a long context on the smallest pages there are,
//! with rows that are smaller to the same degree and heaps of as many pages: the same pages,
//! mappings and batches in a fraction of the memory. Steps are timed on pages of the real size.

use std::fs;
use std::time::Instant;

use lacuna_pages::device::Patience;
use lacuna_pages::{Buffer, ByteLength, Error, PageSize, Pool, PoolConfig, Request};
use serde::Serialize;

use super::{BUFFERS, DeviceKind, Extent, LAYERS, PAGE, ROW_BYTES, TOKENS_PER_PAGE};
use crate::samples::{Samples, Timing};

#[derive(Debug, Serialize)]
pub(super) struct Decode {
    pub(super) layers: u32,
    pub(super) buffers: usize,
    pub(super) row_bytes: usize,
    pub(super) page_bytes: u64,
    pub(super) tokens: usize,
    /// The size of the pages that stood for them while map calls were counted.
    pub(super) counted_page_bytes: u64,
    pub(super) batches_per_1000_tokens: f64,
    pub(super) map_operations_per_1000_tokens: f64,
    pub(super) pages_per_1000_tokens: f64,
    /// Separate mappings at the end, by the ledger.
    pub(super) mappings: u64,
    /// How many more mappings the kernel lists for this process than before.
    pub(super) kernel_mappings: Option<u64>,
    /// The most the kernel allows a process.
    pub(super) kernel_mapping_limit: Option<u64>,
    pub(super) timed_tokens: usize,
    /// Mapping before a token that begins a page in all buffers.
    pub(super) step_at_boundary: Option<Timing>,
    /// Mapping before any other token: nothing is missing.
    pub(super) step_between: Option<Timing>,
}

pub(super) fn measure(device: DeviceKind, extent: &Extent) -> Result<Decode, Error> {
    let pool = device.pool(PoolConfig::default())?;
    let smallest = pool.capabilities().page_sizes.iter().copied().min();
    let counted = smallest.unwrap_or(PAGE).min(PAGE);
    let before = kernel_mappings();
    let grown = Grown::new(device, counted, extent.decoded_tokens)?;
    let ledger = grown.pool.ledger();
    let kernel_mappings = kernel_mappings().zip(before);
    let timed = Grown::new(device, PAGE, extent.timed_tokens)?;
    let per_1000 = |count: u64| count as f64 * 1e3 / extent.decoded_tokens as f64;
    Ok(Decode {
        layers: LAYERS,
        buffers: BUFFERS,
        row_bytes: ROW_BYTES,
        page_bytes: PAGE.bytes(),
        tokens: extent.decoded_tokens,
        counted_page_bytes: counted.bytes(),
        batches_per_1000_tokens: per_1000(ledger.counts.batches),
        map_operations_per_1000_tokens: per_1000(ledger.counts.map_calls),
        pages_per_1000_tokens: per_1000(ledger.counts.pages_mapped),
        mappings: ledger.regions,
        kernel_mappings: kernel_mappings.map(|(after, before)| after.saturating_sub(before)),
        kernel_mapping_limit: kernel_mapping_limit(),
        timed_tokens: extent.timed_tokens,
        step_at_boundary: timed.at_boundary.timing(),
        step_between: timed.between.timing(),
    })
}

/// A KV cache after decoding.
struct Grown {
    pool: Pool,
    /// Held so that mappings can still be counted.
    _buffers: Vec<Buffer>,
    at_boundary: Samples,
    between: Samples,
}

impl Grown {
    fn new(device: DeviceKind, page_size: PageSize, tokens: usize) -> Result<Self, Error> {
        let default = PoolConfig::default();
        let pool = device.pool(PoolConfig {
            page_size,
            heap_bytes: ByteLength::new(
                default.heap_bytes.get() / default.page_size.bytes() * page_size.bytes(),
            ),
            ..default
        })?;
        let row = page_size.bytes() as usize / TOKENS_PER_PAGE;
        let length = ByteLength::new((tokens * row) as u64);
        let mut buffers = (0..BUFFERS)
            .map(|index| pool.reserve(length, index.to_string()))
            .collect::<Result<Vec<Buffer>, Error>>()?;
        let (mut at_boundary, mut between) = (Samples::default(), Samples::default());
        for token in 0..tokens {
            let rows = token * row..(token + 1) * row;
            let mut requests: Vec<Request<'_>> = buffers
                .iter_mut()
                .map(|buffer| Request::new(buffer, rows.clone()))
                .collect();
            let start = Instant::now();
            let report = pool.ensure_mapped(&mut requests)?;
            pool.wait(report.fence, Patience::Block)?;
            match token % TOKENS_PER_PAGE {
                0 => at_boundary.push(start.elapsed()),
                _ => between.push(start.elapsed()),
            }
        }
        Ok(Self {
            pool,
            _buffers: buffers,
            at_boundary,
            between,
        })
    }
}

/// How many mappings the kernel lists for this process, where it does.
fn kernel_mappings() -> Option<u64> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    Some(maps.lines().count() as u64)
}

fn kernel_mapping_limit() -> Option<u64> {
    let limit = fs::read_to_string("/proc/sys/vm/max_map_count").ok()?;
    limit.trim().parse().ok()
}
