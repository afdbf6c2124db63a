//! A KV cache growing token by token: by mapping further pages, and by copying into twice the room,
//! as engines without a page table do.
//!
//! One layer's K and V, of all layers' 72 buffers, so that the longest context fits any machine;
//! each token's rows are written. Both sides start from nothing every time, so that memory fresh
//! from the system is in the figures of both. The context lengths are powers of two: they just fill
//! what doubling allocated, which is its best case.

use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use lacuna_pages::device::Patience;
use lacuna_pages::{ByteLength, Error, PoolConfig, Request};
use serde::Serialize;

use super::{DeviceKind, Extent, PAGE, ROW_BYTES, TOKENS_PER_PAGE, supported};
use crate::samples::median;

#[derive(Debug, Serialize)]
pub(super) struct Growth {
    /// Buffers that grow: one layer's K and V.
    pub(super) buffers: usize,
    pub(super) row_bytes: usize,
    /// Tokens for which address space was reserved.
    pub(super) context_tokens: usize,
    pub(super) lengths: Vec<Lengths>,
}

/// Both ways of growing to one length.
#[derive(Debug, Serialize)]
pub(super) struct Lengths {
    pub(super) tokens: usize,
    /// Nothing on a device whose memory the host cannot write.
    pub(super) mapping: Option<Grown>,
    pub(super) copying: Grown,
}

/// Medians of the repetitions.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Grown {
    /// All tokens, rows written.
    pub(super) total_ms: f64,
    /// The token that took longest.
    pub(super) longest_step_us: f64,
    /// Bytes held at the worst moment.
    pub(super) peak_bytes: u64,
}

/// One growth as it happens.
#[derive(Default)]
struct Watch {
    total: Duration,
    longest: Duration,
    peak_bytes: u64,
}

impl Watch {
    fn step(&mut self, started: Instant) {
        let elapsed = started.elapsed();
        self.total += elapsed;
        self.longest = self.longest.max(elapsed);
    }

    fn holds(&mut self, bytes: u64) {
        self.peak_bytes = self.peak_bytes.max(bytes);
    }
}

pub(super) fn measure(
    device: DeviceKind,
    extent: &Extent,
    progress: &ProgressBar,
) -> Result<Growth, Error> {
    let context_tokens = extent
        .grown_tokens
        .iter()
        .copied()
        .max()
        .unwrap_or_default();
    let mut lengths = Vec::new();
    for &tokens in extent.grown_tokens {
        let (mut mapping, mut copying) = (Vec::new(), Vec::new());
        for _ in 0..extent.growths {
            mapping.extend(supported(by_mapping(device, tokens, context_tokens))?);
            copying.push(by_copying(tokens));
        }
        let mapping = (!mapping.is_empty()).then(|| medians(&mapping));
        lengths.push(Lengths {
            tokens,
            mapping,
            copying: medians(&copying),
        });
        progress.inc(1);
    }
    Ok(Growth {
        buffers: 2,
        row_bytes: ROW_BYTES,
        context_tokens,
        lengths,
    })
}

fn medians(growths: &[Watch]) -> Grown {
    let middle =
        |value: fn(&Watch) -> f64| median(growths.iter().map(value).collect()).unwrap_or_default();
    Grown {
        total_ms: middle(|growth| growth.total.as_secs_f64() * 1e3),
        longest_step_us: middle(|growth| growth.longest.as_secs_f64() * 1e6),
        peak_bytes: growths
            .iter()
            .map(|growth| growth.peak_bytes)
            .max()
            .unwrap_or_default(),
    }
}

fn by_mapping(device: DeviceKind, tokens: usize, context_tokens: usize) -> Result<Watch, Error> {
    let pool = device.pool(PoolConfig {
        page_size: PAGE,
        ..PoolConfig::default()
    })?;
    let length = ByteLength::new((context_tokens * ROW_BYTES) as u64);
    let mut watch = Watch::default();
    let started = Instant::now();
    let (mut keys, mut values) = (
        pool.reserve(length, "keys")?,
        pool.reserve(length, "values")?,
    );
    watch.step(started);
    for token in 0..tokens {
        let row = row(token);
        let bytes = token * ROW_BYTES..(token + 1) * ROW_BYTES;
        let started = Instant::now();
        let report = pool.ensure_mapped(&mut [
            Request::new(&mut keys, bytes.clone()),
            Request::new(&mut values, bytes.clone()),
        ])?;
        pool.wait(report.fence, Patience::Block)?;
        keys.bytes_mut(bytes.clone())?.copy_from_slice(&row);
        values.bytes_mut(bytes)?.copy_from_slice(&row);
        watch.step(started);
        watch.holds(pool.ledger().committed.get());
    }
    Ok(watch)
}

fn by_copying(tokens: usize) -> Watch {
    let mut watch = Watch::default();
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    let mut held = 0;
    for token in 0..tokens {
        let row = row(token);
        let started = Instant::now();
        let wanted = (2 * keys.capacity()).max(TOKENS_PER_PAGE * ROW_BYTES);
        for rows in [&mut keys, &mut values] {
            if rows.len() == rows.capacity() {
                let mut larger = Vec::with_capacity(wanted);
                held += larger.capacity() as u64;
                watch.holds(held);
                larger.extend_from_slice(rows);
                held -= rows.capacity() as u64;
                *rows = larger;
            }
            rows.extend_from_slice(&row);
        }
        watch.step(started);
    }
    std::hint::black_box((keys, values));
    watch
}

fn row(token: usize) -> [u8; ROW_BYTES] {
    [token as u8; ROW_BYTES]
}
