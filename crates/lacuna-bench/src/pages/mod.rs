//! `lacuna bench pages`: what moving pages costs and what it saves.
//!
//! Four measurements on one device: each operation on pages of each size, the map calls of a
//! decoding model, a KV cache that grows by mapping beside one that grows by copying, and the speed
//! of reading scattered pages. At most about 600 MiB are in use at any time.

mod decode;
mod growth;
mod operations;
mod reading;
mod table;

use std::str::FromStr;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use lacuna_pages::{
    DenseDevice, Error, HostConfig, HostDevice, HugePages, PageSize, Pool, PoolConfig,
};
use serde::Serialize;

use crate::arguments::BenchPagesArgs;
use crate::machine::Machine;
use lacuna_cli::output;

/// The geometry all model-like measurements share, Qwen3-4B's: 36 layers of K and V, 8 key/value
/// heads of 128 elements of 16 bits, 32 tokens to a page.
const LAYERS: u32 = 36;
const BUFFERS: usize = 2 * LAYERS as usize;
const ROW_BYTES: usize = 2048;
const PAGE: PageSize = PageSize::KIB_64;
/// The host device's settings for huge pages.
const HUGE: HostConfig = HostConfig {
    huge_pages: HugePages::Collapse,
    ..HostConfig::DEFAULT
};

const TOKENS_PER_PAGE: usize = PAGE.bytes() as usize / ROW_BYTES;

/// Whose pages are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DeviceKind {
    Host,
    /// The host device with its long mappings in huge pages.
    HostHuge,
    Dense,
    Vulkan,
}

/// A name that no device has.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no such device; choose host, host-huge, dense or vulkan")]
pub(crate) struct UnknownDevice;

impl FromStr for DeviceKind {
    type Err = UnknownDevice;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "host" => Ok(Self::Host),
            "host-huge" => Ok(Self::HostHuge),
            "dense" => Ok(Self::Dense),
            "vulkan" => Ok(Self::Vulkan),
            _ => Err(UnknownDevice),
        }
    }
}

impl DeviceKind {
    fn pool(self, config: PoolConfig) -> Result<Pool, Error> {
        match self {
            Self::Host => Pool::new(HostDevice::new()?, config),
            Self::HostHuge => Pool::new(HostDevice::with_config(HUGE)?, config),
            Self::Dense => Pool::new(DenseDevice::new(), config),
            Self::Vulkan => Pool::new(lacuna_pages::vulkan::VulkanDevice::open()?, config),
        }
    }
}

/// How much is measured.
struct Extent {
    /// Rounds of every operation on every page size, each on a fresh pool.
    rounds: usize,
    /// The most bytes one buffer of a round holds.
    round_bytes: u64,
    /// Tokens decoded to count map calls.
    decoded_tokens: usize,
    /// Tokens decoded to time the steps.
    timed_tokens: usize,
    /// Context lengths grown to.
    grown_tokens: &'static [usize],
    /// Repetitions of every growth.
    growths: usize,
    /// Bytes read.
    read_bytes: usize,
    /// Reads of each side.
    reads: usize,
}

const FULL: Extent = Extent {
    rounds: 5,
    round_bytes: 64 << 20,
    decoded_tokens: 32_768,
    timed_tokens: 1_024,
    grown_tokens: &[1_024, 4_096, 16_384, 65_536],
    growths: 3,
    read_bytes: 256 << 20,
    reads: 15,
};

const QUICK: Extent = Extent {
    rounds: 1,
    round_bytes: 4 << 20,
    decoded_tokens: 1_024,
    timed_tokens: 64,
    grown_tokens: &[256, 1_024],
    growths: 1,
    read_bytes: 8 << 20,
    reads: 3,
};

#[derive(Serialize)]
struct Report {
    machine: Machine,
    device: DeviceKind,
    quick: bool,
    operations: Vec<operations::Costs>,
    decode: decode::Decode,
    growth: growth::Growth,
    reading: Option<reading::Reading>,
}

pub(crate) fn run(args: &BenchPagesArgs) -> Result<()> {
    let report = measure(args)?;
    if args.json {
        output::json(&report)
    } else {
        output::print(|out| table::print(out, &report))?;
        Ok(())
    }
}

fn measure(args: &BenchPagesArgs) -> Result<Report> {
    let (device, extent) = (args.device, if args.quick { QUICK } else { FULL });
    let sizes = measured_sizes(device)?;
    let steps = sizes.len() + 2 + extent.grown_tokens.len();
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {msg}")?;
    let progress = ProgressBar::new(steps as u64).with_style(style);
    let mut operations = Vec::new();
    for size in sizes {
        progress.set_message(format!("pages of {size}"));
        let costs = operations::measure(device, size, &extent);
        operations.push(costs.with_context(|| format!("pages of {size}"))?);
        progress.inc(1);
    }
    progress.set_message("decoding");
    let decode = decode::measure(device, &extent).context("decoding")?;
    progress.inc(1);
    progress.set_message("growing");
    let growth = growth::measure(device, &extent, &progress).context("growing")?;
    progress.set_message("reading");
    let reading = reading::measure(device, &extent).context("reading")?;
    progress.finish_and_clear();
    Ok(Report {
        machine: Machine::this(),
        device,
        quick: args.quick,
        operations,
        decode,
        growth,
        reading,
    })
}

/// Those of the measured page sizes that the device has.
fn measured_sizes(device: DeviceKind) -> Result<Vec<PageSize>, Error> {
    let pool = device.pool(PoolConfig::default())?;
    let mut sizes = vec![
        PageSize::KIB_4,
        PageSize::KIB_16,
        PageSize::KIB_64,
        PageSize::KIB_256,
        PageSize::MIB_2,
    ];
    sizes.retain(|size| pool.capabilities().page_sizes.contains(size));
    Ok(sizes)
}

/// What the device did, or nothing where it lacks the capability.
fn supported<T>(result: Result<T, Error>) -> Result<Option<T>, Error> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(Error::Unsupported { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_are_not_there_are_told_apart() {
        assert_eq!("dense".parse(), Ok(DeviceKind::Dense));
        assert_eq!("vulkan".parse(), Ok(DeviceKind::Vulkan));
        assert_eq!("metal".parse::<DeviceKind>(), Err(UnknownDevice));
    }
}
