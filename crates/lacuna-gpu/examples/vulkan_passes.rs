//! What passes of a model cost on this machine's device, and where their time goes:
//! `cargo run --release -p lacuna-gpu --example vulkan_passes -- model.gguf`.
//!
//! Times of passes are by the host's clock, from the call to the logits; those of kernels by the device's.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lacuna_files::ModelFiles;
use lacuna_gpu::Vulkan;
use lacuna_kernels::{Cpu, CpuConfig, ElementType};
use lacuna_kv::{KvElements, KvPolicy, Layout, Sequence};
use lacuna_models::plan::ArenaPlan;
use lacuna_models::{BatchLimits, ComputeDevice, Executor, LogitRows, Model, Segment};

const CONTEXT: usize = 4608;
const PROMPT: usize = 512;
const STEPS: usize = 128;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let path = std::env::args().nth(1).ok_or("name a GGUF file")?;
    let device = Vulkan::open()?;
    let begin = Instant::now();
    let model = Arc::new(Model::load(ModelFiles::open(Path::new(&path))?)?);
    let limits = BatchLimits {
        tokens: PROMPT,
        logit_rows: 16,
        context_tokens: CONTEXT,
    };
    let plan = ArenaPlan::new(model.program(), limits)?;
    let geometry = model
        .spec()
        .kv_geometry(KvElements::both(ElementType::F16))?;
    let mut executor = device.executor(Arc::clone(&model), &geometry, &plan)?;
    let cpu = Cpu::new(CpuConfig {
        threads: NonZeroUsize::MIN,
        ..CpuConfig::default()
    })?;
    let weights = executor.memory().weight_bytes;
    println!(
        "{}: {path}, {:.2} GB of weights, on the device in {:.1} s",
        device.name(),
        weights as f64 / 1e9,
        begin.elapsed().as_secs_f64()
    );
    // All layers in one buffer, as a device has them unless told otherwise, and a buffer each.
    let policies = [
        KvPolicy::default(),
        KvPolicy::Sparse(Layout::Interleaved(NonZeroUsize::MIN)),
    ];
    for policy in policies {
        let cache = device.kv_cache(geometry.clone(), policy)?;
        println!("\n--kv {policy}");
        let mut bench = Bench {
            executor: &mut *executor,
            cpu: &cpu,
            vocabulary: model.spec().vocabulary as u32,
            next: 1,
        };
        let mut prompts = Vec::new();
        for _ in 0..5 {
            let mut sequence = cache.sequence(CONTEXT)?;
            prompts.push(bench.pass(&mut [&mut sequence], PROMPT)?);
        }
        tell(&format!("prompt of {PROMPT}"), PROMPT, &mut prompts);
        for (depth, count) in [(0, 1), (4096, 1), (0, 4), (0, 16)] {
            let mut all = Vec::new();
            for _ in 0..count {
                let mut sequence = cache.sequence(CONTEXT)?;
                for _ in (0..depth).step_by(PROMPT) {
                    bench.pass(&mut [&mut sequence], PROMPT)?;
                }
                all.push(sequence);
            }
            let mut steps = Vec::new();
            for _ in 0..STEPS {
                let mut all: Vec<&mut Sequence> = all.iter_mut().collect();
                steps.push(bench.pass(&mut all, 1)?);
            }
            tell(&format!("{count} at depth {depth}"), count, &mut steps[1..]);
        }
    }
    let cache = device.kv_cache(geometry.clone(), KvPolicy::default())?;
    executor.time_kernels(true)?;
    for (what, tokens, depth) in [("prompt", PROMPT, 0), ("token", 1, PROMPT)] {
        let mut bench = Bench {
            executor: &mut *executor,
            cpu: &cpu,
            vocabulary: model.spec().vocabulary as u32,
            next: 1,
        };
        let mut sequence = cache.sequence(CONTEXT)?;
        if depth > 0 {
            bench.pass(&mut [&mut sequence], depth)?;
        }
        let mut took = Duration::ZERO;
        for _ in 0..4 {
            took = bench.pass(&mut [&mut sequence], tokens)?;
        }
        println!("\n{what}: {:.3} ms", took.as_secs_f64() * 1e3);
        for kernel in executor.kernel_times()? {
            println!(
                "  {:<16}{:>6} times {:>10.3} ms {:>8.1} us each, {:?} workgroups",
                kernel.kernel,
                kernel.dispatches,
                kernel.time.as_secs_f64() * 1e3,
                kernel.time.as_secs_f64() * 1e6 / kernel.dispatches.max(1) as f64,
                kernel.groups
            );
        }
    }
    Ok(())
}

struct Bench<'a> {
    executor: &'a mut dyn Executor,
    cpu: &'a Cpu,
    vocabulary: u32,
    next: u32,
}

impl Bench<'_> {
    /// `tokens` more of each sequence, with a row of logits each.
    fn pass(&mut self, sequences: &mut [&mut Sequence], tokens: usize) -> Result<Duration> {
        let ids: Vec<u32> = (0..tokens * sequences.len())
            .map(|_| {
                self.next = self
                    .next
                    .wrapping_mul(1_664_525)
                    .wrapping_add(1_013_904_223);
                (self.next >> 8) % self.vocabulary
            })
            .collect();
        let begin = Instant::now();
        for sequence in &mut *sequences {
            sequence.prepare(tokens)?;
        }
        let segments = sequences.iter_mut().zip(ids.chunks(tokens));
        let mut segments: Vec<Segment<'_>> = segments
            .map(|(sequence, tokens)| Segment {
                tokens,
                sequence,
                logits: LogitRows::Last,
                images: &[],
            })
            .collect();
        self.executor.forward(self.cpu, &mut segments)?;
        let took = begin.elapsed();
        drop(segments);
        for sequence in sequences {
            sequence.accept(tokens);
        }
        Ok(took)
    }
}

fn tell(what: &str, tokens: usize, times: &mut [Duration]) {
    times.sort_unstable();
    let at = |part: usize| times[(times.len() * part / 100).min(times.len() - 1)].as_secs_f64();
    println!(
        "{what:<20}{:>10.1} tokens/s, median {:.3} ms, 99th percentile {:.3} ms",
        tokens as f64 / at(50),
        at(50) * 1e3,
        at(99) * 1e3
    );
}
