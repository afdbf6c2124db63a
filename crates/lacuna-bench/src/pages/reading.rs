//! Reading a flat range whose pages are scattered, beside reading one allocation in huge pages: what
//! attention pays for the page table. The reads alternate, and the ratio is the median of pairs.

use std::time::Instant;

use anyhow::{Context, Result};
#[cfg(target_os = "linux")]
use lacuna_cli::tell;
use lacuna_pages::device::Aliasing;
use lacuna_pages::{Buffer, ByteLength, Error, PageRange, PageSize, PoolConfig, VirtualPage};
use memmap2::MmapMut;
use serde::Serialize;

use super::{DeviceKind, Extent, PAGE, supported};
use crate::samples::median;

#[derive(Debug, Serialize)]
pub(super) struct Reading {
    pub(super) bytes: usize,
    pub(super) page_bytes: u64,
    /// Whether the pages' order was changed; they stay in order where pages cannot be shared.
    pub(super) scattered: bool,
    /// How much of the allocation the kernel holds in huge pages.
    pub(super) huge_page_bytes: Option<u64>,
    pub(super) pages_gb_per_s: f64,
    pub(super) huge_array_gb_per_s: f64,
    /// Pages over array.
    pub(super) ratio: f64,
    pub(super) reads: usize,
}

/// Nothing on a device that the host cannot read.
pub(super) fn measure(device: DeviceKind, extent: &Extent) -> Result<Option<Reading>> {
    let Some(pages) = supported(Pages::new(device, extent.read_bytes))? else {
        return Ok(None);
    };
    let before = huge_page_bytes();
    let array = huge_array(extent.read_bytes)?;
    let huge_page_bytes = huge_page_bytes().zip(before);
    let flat = pages.buffer.bytes(0..extent.read_bytes)?;
    let (mut rates, mut array_rates, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..extent.reads {
        let (rate, array_rate) = (rate(flat), rate(&array));
        rates.push(rate);
        array_rates.push(array_rate);
        ratios.push(rate / array_rate);
    }
    let middle = |values| median(values).context("nothing was read");
    Ok(Some(Reading {
        bytes: extent.read_bytes,
        page_bytes: page_size(device).bytes(),
        scattered: pages.scattered,
        huge_page_bytes: huge_page_bytes.map(|(after, before)| after.saturating_sub(before)),
        pages_gb_per_s: middle(rates)?,
        huge_array_gb_per_s: middle(array_rates)?,
        ratio: middle(ratios)?,
        reads: extent.reads,
    }))
}

/// The page size measured: the model's, or the one that becomes huge pages.
fn page_size(device: DeviceKind) -> PageSize {
    match device {
        DeviceKind::HostHuge => PageSize::MIB_2,
        _ => PAGE,
    }
}

/// A buffer no page of which follows its neighbour in physical memory.
struct Pages {
    buffer: Buffer,
    scattered: bool,
}

impl Pages {
    fn new(device: DeviceKind, length: usize) -> Result<Self, Error> {
        let pool = device.pool(PoolConfig {
            page_size: page_size(device),
            ..PoolConfig::default()
        })?;
        let reserved = ByteLength::new(length as u64);
        let mut ordered = pool.reserve(reserved, "ordered")?;
        ordered.ensure_mapped(0..length)?;
        ordered.bytes_mut(0..length)?.fill(1);
        if pool.capabilities().aliasing != Aliasing::Shared {
            return Ok(Self {
                buffer: ordered,
                scattered: false,
            });
        }
        let pages = page_size(device).pages_for(reserved).get();
        ordered.seal(PageRange::of(0..pages))?;
        let mut buffer = pool.reserve(reserved, "scattered")?;
        for page in 0..pages {
            // A power of two of pages and an odd factor: every page once.
            let source = VirtualPage::new(page * 1_151 % pages);
            buffer.share_from(&ordered, PageRange::one(source), VirtualPage::new(page))?;
        }
        Ok(Self {
            buffer,
            scattered: true,
        })
    }
}

/// One allocation, in huge pages if the system has them to give.
fn huge_array(length: usize) -> Result<MmapMut> {
    let mut array = MmapMut::map_anon(length).context("cannot allocate the array")?;
    #[cfg(target_os = "linux")]
    if let Err(error) = array.advise(memmap2::Advice::HugePage) {
        tell!("the array is in small pages: {error}");
    }
    array.fill(1);
    Ok(array)
}

/// How much memory of this process the kernel holds in huge pages, where it says.
fn huge_page_bytes() -> Option<u64> {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").ok()?;
    let field = rollup
        .lines()
        .find_map(|line| line.strip_prefix("AnonHugePages:"))?;
    let kib: u64 = field.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Gigabytes (1e9) per second.
fn rate(bytes: &[u8]) -> f64 {
    let start = Instant::now();
    std::hint::black_box(sum(std::hint::black_box(bytes)));
    bytes.len() as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// Adds all words up, from seven places at once, as attention reads K and V of several threads: one
/// place alone leaves the memory waiting, because processors fetch ahead only within 4 KiB. Their
/// distance is no power of two, or all would compete for the same few lines of the cache.
fn sum(bytes: &[u8]) -> u64 {
    const STREAMS: usize = 7;
    let (blocks, rest) = bytes.as_chunks::<64>();
    let length = blocks.len() / STREAMS;
    let (streams, last) = blocks.split_at(length * STREAMS);
    let mut sums = [0u64; 8];
    for index in 0..length {
        for stream in 0..STREAMS {
            add(&mut sums, &streams[stream * length + index]);
        }
    }
    for block in last {
        add(&mut sums, block);
    }
    let rest = rest.iter().copied().map(u64::from);
    sums.into_iter().chain(rest).fold(0, u64::wrapping_add)
}

fn add(sums: &mut [u64; 8], block: &[u8; 64]) {
    let (words, _) = block.as_chunks::<8>();
    for (sum, word) in sums.iter_mut().zip(words) {
        *sum = sum.wrapping_add(u64::from_le_bytes(*word));
    }
}

#[cfg(test)]
mod tests {
    use super::sum;

    #[test]
    fn every_word_is_read_once() {
        let words: Vec<u8> = (0..1_000u64).flat_map(u64::to_le_bytes).collect();
        assert_eq!(sum(&words), 499_500);
        assert_eq!(sum(&[1, 2, 3]), 6);
    }
}
