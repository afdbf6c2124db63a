//! What each operation costs on the host device, per page, and what Qwen3-4B's geometry asks of it.
//! Medians of several rounds in one run: `cargo bench -p lacuna-pages`.

use std::time::Instant;

use lacuna_pages::{
    Buffer, ByteLength, Error, HostDevice, PageRange, PageSize, Pool, PoolConfig, Request,
    VirtualPage,
};

/// Pages an operation is measured over, one call each.
const PAGES: u64 = 256;
const ROUNDS: usize = 9;

fn main() -> Result<(), Error> {
    println!(
        "microseconds per page, one page a call (medians of {PAGES} calls, of {ROUNDS} rounds)"
    );
    println!(
        "  page     commit+map  recycle+map   share   unmap  share(run)  copy   seal  give back"
    );
    for size in [
        PageSize::KIB_4,
        PageSize::KIB_16,
        PageSize::KIB_64,
        PageSize::KIB_256,
    ] {
        costs(size)?;
    }
    geometry()?;
    flat_read()
}

fn pool(page_size: PageSize) -> Result<Pool, Error> {
    Pool::new(
        HostDevice::new()?,
        PoolConfig {
            page_size,
            ..PoolConfig::default()
        },
    )
}

/// Microseconds of the median of `PAGES` calls: what a call costs when nothing else runs.
fn timed(mut call: impl FnMut(u64) -> Result<(), Error>) -> Result<f64, Error> {
    let mut costs = Vec::with_capacity(PAGES as usize);
    for page in 0..PAGES {
        let start = Instant::now();
        call(page)?;
        costs.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(median(costs))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn one(page: u64) -> PageRange {
    PageRange::one(VirtualPage::new(page))
}

fn costs(size: PageSize) -> Result<(), Error> {
    let mut columns: Vec<Vec<f64>> = vec![Vec::new(); 8];
    for _ in 0..ROUNDS {
        for (column, cost) in columns.iter_mut().zip(round(size)?) {
            column.push(cost);
        }
    }
    print!("{:>8}", size.to_string());
    for (column, width) in columns.into_iter().zip([13, 13, 9, 8, 9, 9, 7, 9]) {
        print!("{:>width$.1}", median(column));
    }
    println!();
    Ok(())
}

fn round(size: PageSize) -> Result<[f64; 8], Error> {
    let pool = pool(size)?;
    let all = PageRange::of(0..PAGES);
    let length = ByteLength::new(PAGES * size.bytes());
    let mut donor = pool.reserve(length, "donor")?;
    let mut other = pool.reserve(length, "other")?;
    let bytes = |page: u64| (page * size.bytes()) as usize..((page + 1) * size.bytes()) as usize;
    let commit = timed(|page| donor.ensure_mapped(bytes(page)).map(drop))?;
    let unmap = timed(|page| donor.unmap(one(page)))?;
    let recycle = timed(|page| donor.ensure_mapped(bytes(page)).map(drop))?;
    donor.bytes_mut(0..length.get() as usize)?.fill(1);
    let seal = timed(|page| donor.seal(one(page)))?;
    let share = timed(|page| {
        other
            .share_from(&donor, one(page), VirtualPage::new(page))
            .map(drop)
    })?;
    other.unmap(all)?;
    let start = Instant::now();
    other.share_from(&donor, all, VirtualPage::new(0))?;
    let share_run = start.elapsed().as_secs_f64() * 1e6 / PAGES as f64;
    let copy = timed(|page| other.make_unique(one(page)).map(drop))?;
    drop((donor, other));
    let idle = pool.ledger().idle.get() / size.bytes();
    let start = Instant::now();
    pool.trim();
    let give_back = start.elapsed().as_secs_f64() * 1e6 / idle as f64;
    Ok([
        commit, recycle, share, unmap, share_run, copy, seal, give_back,
    ])
}

/// 72 buffers growing token by token; pages of 4 KiB stand for 64 KiB ones (the same mappings).
fn geometry() -> Result<(), Error> {
    const TOKENS: usize = 32_768;
    const ROW: usize = 128;
    let config = PoolConfig {
        page_size: PageSize::KIB_4,
        heap_bytes: ByteLength::mebibytes(4),
        ..PoolConfig::default()
    };
    let pool = Pool::new(HostDevice::new()?, config)?;
    let length = ByteLength::new((TOKENS * ROW) as u64);
    let mut buffers = (0..72)
        .map(|_| pool.reserve(length, ""))
        .collect::<Result<Vec<Buffer>, Error>>()?;
    let (mut crossing, mut between) = (Vec::new(), Vec::new());
    for token in 0..TOKENS {
        let rows = token * ROW..(token + 1) * ROW;
        let mut requests: Vec<_> = buffers
            .iter_mut()
            .map(|buffer| Request::new(buffer, rows.clone()))
            .collect();
        let start = Instant::now();
        let mapped = pool.ensure_mapped(&mut requests)?.pages_mapped.get();
        let cost = start.elapsed().as_secs_f64() * 1e6;
        if mapped > 0 {
            crossing.push(cost)
        } else {
            between.push(cost)
        }
    }
    let ledger = pool.ledger();
    println!("\nQwen3-4B geometry: 72 buffers, {TOKENS} tokens, 32 tokens to a page");
    println!(
        "  step at a page boundary {:.0} us, any other {:.2} us",
        median(crossing),
        median(between)
    );
    println!(
        "  {} pages in {} map calls of {} batches; {} regions ({:.1} % of 65,530)",
        ledger.counts.pages_mapped,
        ledger.counts.map_calls,
        ledger.counts.batches,
        ledger.regions,
        ledger.regions as f64 / 655.30
    );
    Ok(())
}

/// Reading 256 MiB: scattered 64 KiB pages against one run.
fn flat_read() -> Result<(), Error> {
    let pool = pool(PageSize::KIB_64)?;
    let length = ByteLength::mebibytes(256);
    let pages = length.get() / PageSize::KIB_64.bytes();
    let mut run = pool.reserve(length, "run")?;
    run.ensure_mapped(0..length.get() as usize)?;
    run.bytes_mut(0..length.get() as usize)?.fill(1);
    run.seal(PageRange::of(0..pages))?;
    let mut scattered = pool.reserve(length, "scattered")?;
    for page in 0..pages {
        let source = page * 1_151 % pages;
        scattered.share_from(&run, one(source), VirtualPage::new(page))?;
    }
    let mut array = vec![0u8; length.get() as usize];
    array.fill(1);
    let mut rates = [Vec::new(), Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        let all = 0..length.get() as usize;
        let sides = [&array[..], run.bytes(all.clone())?, scattered.bytes(all)?];
        for (rate, bytes) in rates.iter_mut().zip(sides) {
            let start = Instant::now();
            let sum: u64 = bytes.chunks_exact(8).fold(0, |sum, word| {
                sum ^ u64::from_le_bytes(word.try_into().unwrap_or_default())
            });
            std::hint::black_box(sum);
            rate.push(bytes.len() as f64 / start.elapsed().as_secs_f64() / 1e9);
        }
    }
    let [array, run, scattered] = rates.map(median);
    println!(
        "\nflat read of 256 MiB, one thread: array {array:.1} GB/s, one run {run:.1} GB/s, scattered 64 KiB pages {scattered:.1} GB/s"
    );
    Ok(())
}
