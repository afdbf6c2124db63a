//! `lacuna bench`: what this machine makes of the work, measured and not estimated.

pub(crate) mod kernels;
pub(crate) mod kv;
mod limits;
mod machine;
pub(crate) mod pages;
mod samples;
pub(crate) mod serve;
pub(crate) mod speed;

use anyhow::Result;
use lacuna::EngineConfig;
use lacuna_kernels::{Cpu, CpuConfig};

/// The processor, with as many threads as an engine would use.
fn processor(config: &EngineConfig) -> Result<Cpu> {
    let threads = config.thread_count()?;
    Ok(Cpu::new(CpuConfig {
        threads,
        level: None,
    })?)
}
