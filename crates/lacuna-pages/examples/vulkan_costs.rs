//! What the page operations of the Vulkan device cost on this machine's driver:
//! `cargo run --release -p lacuna-pages --features vulkan --example vulkan_costs`.
//!
//! Times are medians, from the call to the moment at which the fence is seen to be reached.

use std::time::{Duration, Instant};

use lacuna_pages::device::{
    Access, Address, Fence, HeapId, Operation, Ordering, Patience, Place, SpaceId,
};
use lacuna_pages::vulkan::VulkanQueue;
use lacuna_pages::{
    ByteLength, Device, DeviceError, PageRange, Pool, PoolConfig, VirtualPage, VulkanDevice,
};

const PAGE: u64 = 65_536;
const ROUNDS: usize = 40;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = match VulkanDevice::open() {
        Err(error @ DeviceError::Unavailable { .. }) => {
            println!("skipped: no sparse Vulkan device ({error})");
            return Ok(());
        }
        device => device?,
    };
    println!("{}, pages of 64 KiB", device.driver_name());
    assert_eq!(device.capabilities().ordering, Ordering::InOrder);
    batches(device)?;
    pool_operations()?;
    flat_reads()
}

/// One batch of `count` operations, scattered and adjacent.
fn batches(mut device: VulkanDevice) -> Result<(), Box<dyn std::error::Error>> {
    println!("\n| pages in a batch | map, scattered | map, adjacent | unmap |\n|---|---|---|---|");
    for count in [1, 16, 64, 256, 1024] {
        let heap = device.create_heap(ByteLength::new(count * PAGE))?;
        let space = device.reserve(ByteLength::new(count * PAGE))?;
        let scattered: Vec<_> = (0..count)
            .map(|page| map(space, page, heap, page * 77 % count))
            .collect();
        let adjacent: Vec<_> = (0..count)
            .map(|page| map(space, page, heap, page))
            .collect();
        let unmap = [Operation::Unmap {
            address: Address { space, offset: 0 },
            length: ByteLength::new(count * PAGE),
        }];
        let (mut times, mut undone) = ([Vec::new(), Vec::new()], Vec::new());
        for _ in 0..ROUNDS {
            for (batch, times) in [&scattered, &adjacent].into_iter().zip(&mut times) {
                times.push(timed(&mut device, batch)?);
                undone.push(timed(&mut device, &unmap)?);
            }
        }
        let [scattered, adjacent] = times.map(|mut times| micros(&mut times));
        println!(
            "| {count} | {scattered} | {adjacent} | {} |",
            micros(&mut undone)
        );
        device.release(space, Fence::DONE)?;
        device.destroy_heap(heap)?;
    }
    Ok(())
}

fn map(space: SpaceId, page: u64, heap: HeapId, from: u64) -> Operation {
    Operation::Map {
        address: Address {
            space,
            offset: page * PAGE,
        },
        place: Place {
            heap,
            offset: from * PAGE,
        },
        length: ByteLength::new(PAGE),
        access: Access::ReadWrite,
    }
}

fn timed(device: &mut VulkanDevice, batch: &[Operation]) -> Result<Duration, DeviceError> {
    let start = Instant::now();
    let fence = device
        .apply(batch, Fence::DONE)
        .map_err(|error| error.cause)?;
    device.wait(fence, Patience::Block)?;
    Ok(start.elapsed())
}

fn micros(times: &mut [Duration]) -> String {
    times.sort_unstable();
    format!("{:.1} us", times[times.len() / 2].as_secs_f64() * 1e6)
}

/// What the pool makes of it, one page at a time.
fn pool_operations() -> Result<(), Box<dyn std::error::Error>> {
    let pool = Pool::new(VulkanDevice::open()?, PoolConfig::default())?;
    let length = ByteLength::mebibytes(64);
    let mut names = ["grow", "seal", "share", "copy on write", "unmap"].map(|name| (name, vec![]));
    let mut source = pool.reserve(length, "source")?;
    source.ensure_mapped(0..PAGE as usize)?;
    source.seal(PageRange::of(0..1))?;
    for round in 0..ROUNDS as u64 {
        let mut buffer = pool.reserve(length, "buffer")?;
        let pages = PageRange::of(round..round + 1);
        let bytes = (round * PAGE) as usize..((round + 1) * PAGE) as usize;
        for (step, (_, times)) in names.iter_mut().enumerate() {
            let start = Instant::now();
            let fence = match step {
                0 => buffer.ensure_mapped(bytes.clone())?.fence,
                1 => buffer.seal(pages).map(|()| Fence::DONE)?,
                2 => {
                    buffer
                        .share_from(&source, PageRange::of(0..1), VirtualPage::new(900))?
                        .fence
                }
                3 => buffer.make_unique(PageRange::of(900..901))?.fence,
                _ => buffer.unmap(pages).map(|()| Fence::DONE)?,
            };
            pool.wait(fence, Patience::Block)?;
            times.push(start.elapsed());
        }
    }
    println!("\n| one page | median |\n|---|---|");
    for (name, mut times) in names {
        println!("| {name} | {} |", micros(&mut times));
    }
    Ok(())
}

/// A kernel's reading of 64 MiB over scattered pages and over one run.
fn flat_reads() -> Result<(), Box<dyn std::error::Error>> {
    let mut device = VulkanDevice::open()?;
    let queue = device.queue();
    let (count, mut lines) = (1024, Vec::new());
    for (name, stride) in [("one run", 1), ("scattered", 77)] {
        let heap = device.create_heap(ByteLength::new(count * PAGE))?;
        let space = device.reserve(ByteLength::new(count * PAGE))?;
        let batch: Vec<_> = (0..count)
            .map(|page| map(space, page, heap, page * stride % count))
            .collect();
        timed(&mut device, &batch)?;
        lines.push((name, read_rate(&queue, space, count * PAGE)?));
    }
    println!("\n| a kernel reads 64 MiB | rate |\n|---|---|");
    for (name, rate) in lines {
        println!("| {name} | {rate:.2} GB/s |");
    }
    Ok(())
}

fn read_rate(queue: &VulkanQueue, space: SpaceId, length: u64) -> Result<f64, DeviceError> {
    let address = Address { space, offset: 0 };
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let start = Instant::now();
        queue.checksum(address, ByteLength::new(length))?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(length as f64 / times[ROUNDS / 2].as_secs_f64() / 1e9)
}
