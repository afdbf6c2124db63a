//! A model on the device, and the same on the processor.

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use lacuna_files::ModelFiles;
use lacuna_gpu::{Vulkan, VulkanConfig};
use lacuna_kernels::{Cpu, CpuConfig, ElementType};
use lacuna_kv::{KvCache, KvElements, KvPolicy, Sequence};
use lacuna_models::plan::ArenaPlan;
use lacuna_models::program::Op;
use lacuna_models::{
    BatchLimits, ComputeDevice, Executor, ExecutorError, Likeliest, LogitRows, Model, Scratch,
    Segment, Shown, TokenLogit,
};
use lacuna_pages::VulkanDevice;
use lacuna_pages::vulkan::PageTable;
use serde::Deserialize;

pub(crate) const CONTEXT: usize = 512;
/// What the order of sums may make of logits, relative.
pub(crate) const BOUND: f64 = 1e-3;
/// What one activation may that lies just between two bytes, where weights are quantized, and is rounded the other way.
const ROUNDED_BOUND: f64 = 3e-2;
pub(crate) const BATCH: usize = 320;

#[derive(Deserialize)]
pub(crate) struct Expected {
    pub(crate) tokens: Vec<u32>,
}

/// What logits of a model may be apart from the processor's. The divisions and roots of a GPU may be off by some last places, where
/// a software driver has the processor's.
pub(crate) fn bound(model: &Model) -> f64 {
    let program = model.program();
    let mut ops = program.steps().iter().flat_map(|step| program.ops(step));
    let is_quantized = ops.any(|op| match op {
        Op::Product { outputs, .. } => outputs
            .iter()
            .any(|(matrix, _)| model.matrix(*matrix).matrix.dtype().is_quantized()),
        Op::ExpertProduct { outputs, .. } => outputs.iter().any(|(experts, _)| {
            let mut experts = model.experts(*experts);
            experts.any(|expert| expert.matrix.dtype().is_quantized())
        }),
        _ => false,
    });
    bound_of(is_quantized)
}

pub(crate) fn bound_of(is_quantized: bool) -> f64 {
    static IS_SOFTWARE: LazyLock<bool> = LazyLock::new(|| {
        let device = VulkanDevice::open().expect("a device");
        device.is_software()
    });
    match is_quantized && !*IS_SOFTWARE {
        true => ROUNDED_BOUND,
        false => BOUND,
    }
}

/// How devices of these tests are used: with their own page tables, unless `LACUNA_TEST_LOOKUP` says that kernels are to look
/// pages up.
pub(crate) fn config() -> VulkanConfig {
    VulkanConfig {
        page_table: match std::env::var_os("LACUNA_TEST_LOOKUP") {
            Some(_) => PageTable::Lookup,
            None => PageTable::Device,
        },
        ..VulkanConfig::default()
    }
}

/// A device that is used so.
pub(crate) fn open_device() -> Vulkan {
    let device = Vulkan::open_with(config()).expect("a device");
    assert_eq!(device.device().page_table(), config().page_table);
    device
}

pub(crate) fn reference() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference")
}

pub(crate) fn expected(model: &str) -> Expected {
    let path = reference().join(model).join("expected.json");
    let text = fs::read(path).expect("a committed fixture");
    serde_json::from_slice(&text).expect("valid JSON")
}

pub(crate) fn load(path: &str) -> Arc<Model> {
    let files = match path {
        "demo" => lacuna_models::demo(),
        path => ModelFiles::open(&reference().join(path)).expect("the fixture opens"),
    };
    Arc::new(Model::load(files).expect("the fixture loads"))
}

fn cpu() -> Cpu {
    let threads = NonZeroUsize::MIN;
    Cpu::new(CpuConfig {
        threads,
        ..CpuConfig::default()
    })
    .expect("this machine's own level")
}

fn plan(model: &Model, logit_rows: usize) -> ArenaPlan {
    let limits = BatchLimits {
        tokens: BATCH,
        logit_rows,
        context_tokens: CONTEXT,
    };
    ArenaPlan::new(model.program(), limits).expect("small")
}

/// A model on the device.
#[derive(Debug)]
pub(crate) struct OnDevice {
    pub(crate) model: Arc<Model>,
    pub(crate) executor: Box<dyn Executor>,
    pub(crate) cache: KvCache,
    cpu: CpuHolder,
}

/// Not worth a line of debug output.
struct CpuHolder(Cpu);

impl std::fmt::Debug for CpuHolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cpu")
    }
}

impl OnDevice {
    pub(crate) fn open(path: &str, element: ElementType) -> Self {
        Self::with(path, element, KvPolicy::default(), config()).expect("the device runs the model")
    }

    pub(crate) fn with(
        path: &str,
        element: ElementType,
        policy: KvPolicy,
        config: VulkanConfig,
    ) -> Result<Self, ExecutorError> {
        let device = Vulkan::open_with(config)?;
        Self::on(&device, path, KvElements::both(element), policy)
    }

    pub(crate) fn on(
        device: &dyn ComputeDevice,
        path: &str,
        elements: KvElements,
        policy: KvPolicy,
    ) -> Result<Self, ExecutorError> {
        Self::behind(device, (path, 0), elements, policy)
    }

    /// The same, whose first layers are the processor's.
    pub(crate) fn behind(
        device: &dyn ComputeDevice,
        (path, host_layers): (&str, usize),
        elements: KvElements,
        policy: KvPolicy,
    ) -> Result<Self, ExecutorError> {
        let model = load(path);
        let geometry = model.spec().kv_geometry(elements).expect("whole blocks");
        let geometry = geometry.with_host_layers(host_layers)?;
        let cache = device.kv_cache(geometry.clone(), policy)?;
        let plan = plan(&model, BATCH);
        let executor = device.executor(Arc::clone(&model), &geometry, &plan)?;
        Ok(Self {
            model,
            executor,
            cache,
            cpu: CpuHolder(cpu()),
        })
    }

    pub(crate) fn plan(&self) -> ArenaPlan {
        plan(&self.model, BATCH)
    }

    pub(crate) fn vocabulary(&self) -> usize {
        self.model.spec().vocabulary
    }

    pub(crate) fn sequence(&self) -> Sequence {
        self.cache.sequence(CONTEXT).expect("address space")
    }

    /// Logits after each of `tokens`, computed in one pass.
    pub(crate) fn extend(&mut self, sequence: &mut Sequence, tokens: &[u32]) -> Vec<f32> {
        let logits = self.pass(&mut [(sequence, tokens)], LogitRows::All);
        sequence.accept(tokens.len());
        logits
    }

    /// Logits after each of `tokens` in one pass, some of which stand for images.
    pub(crate) fn extend_shown(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        images: &[Shown],
    ) -> Vec<f32> {
        sequence.prepare(tokens.len()).expect("room");
        let segment = Segment {
            tokens,
            sequence,
            logits: LogitRows::All,
            images,
        };
        let logits = self.executor.forward(&self.cpu.0, &mut [segment]);
        let logits = logits.expect("valid tokens").to_vec();
        sequence.accept(tokens.len());
        logits
    }

    /// A pass over several sequences, which are not accepted.
    pub(crate) fn pass(
        &mut self,
        all: &mut [(&mut Sequence, &[u32])],
        logits: LogitRows,
    ) -> Vec<f32> {
        let segments = all.iter_mut().map(|(sequence, tokens)| {
            sequence.prepare(tokens.len()).expect("room");
            Segment {
                tokens,
                sequence,
                logits,
                images: &[],
            }
        });
        let mut segments: Vec<Segment<'_>> = segments.collect();
        let passed = self.executor.forward(&self.cpu.0, &mut segments);
        passed.expect("valid tokens").to_vec()
    }

    /// The likeliest token after each of `tokens`, found on the device in one pass.
    pub(crate) fn likeliest(&mut self, sequence: &mut Sequence, tokens: &[u32]) -> Vec<Likeliest> {
        sequence.prepare(tokens.len()).expect("room");
        let segment = Segment {
            tokens,
            sequence,
            logits: LogitRows::All,
            images: &[],
        };
        let found = self.executor.likeliest(&self.cpu.0, &mut [segment]);
        let found = found.expect("valid tokens").to_vec();
        sequence.accept(tokens.len());
        found
    }

    /// The `count` likeliest tokens after each of `tokens`, found on the device in one pass.
    pub(crate) fn top_k(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        count: usize,
    ) -> Vec<TokenLogit> {
        sequence.prepare(tokens.len()).expect("room");
        let segment = Segment {
            tokens,
            sequence,
            logits: LogitRows::All,
            images: &[],
        };
        let found = self.executor.top_k(&self.cpu.0, &mut [segment], count);
        let found = found.expect("valid tokens").to_vec();
        sequence.accept(tokens.len());
        found
    }

    pub(crate) fn logits(&mut self, tokens: &[u32]) -> Vec<f32> {
        let mut sequence = self.sequence();
        self.extend(&mut sequence, tokens)
    }

    pub(crate) fn greedy(&mut self, prompt: &[u32], count: usize) -> Vec<u32> {
        let mut sequence = self.sequence();
        let vocabulary = self.vocabulary();
        follow(prompt, count, vocabulary, |tokens| {
            self.extend(&mut sequence, tokens)
        })
    }
}

/// A model on the processor.
pub(crate) struct OnProcessor {
    pub(crate) model: Arc<Model>,
    cpu: Cpu,
    scratch: Scratch,
    cache: KvCache,
}

impl OnProcessor {
    pub(crate) fn open(path: &str, element: ElementType) -> Self {
        Self::with(path, KvElements::both(element))
    }

    pub(crate) fn with(path: &str, elements: KvElements) -> Self {
        let model = load(path);
        let geometry = model.spec().kv_geometry(elements).expect("whole blocks");
        let scratch = Scratch::new(model.program(), plan(&model, BATCH)).expect("memory");
        Self {
            cache: KvCache::new(geometry, KvPolicy::default()).expect("pages"),
            cpu: cpu(),
            scratch,
            model,
        }
    }

    fn sequence(&self) -> Sequence {
        self.cache.sequence(CONTEXT).expect("address space")
    }

    fn extend(&mut self, sequence: &mut Sequence, tokens: &[u32]) -> Vec<f32> {
        self.extend_shown(sequence, tokens, &[])
    }

    fn extend_shown(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        images: &[Shown],
    ) -> Vec<f32> {
        sequence.prepare(tokens.len()).expect("room");
        let segment = Segment {
            tokens,
            sequence,
            logits: LogitRows::All,
            images,
        };
        let (model, scratch) = (&self.model, &mut self.scratch);
        let logits = model.forward(&self.cpu, &mut [segment], scratch);
        let logits = logits.expect("valid tokens").to_vec();
        sequence.accept(tokens.len());
        logits
    }

    pub(crate) fn logits_shown(&mut self, tokens: &[u32], images: &[Shown]) -> Vec<f32> {
        let mut sequence = self.sequence();
        self.extend_shown(&mut sequence, tokens, images)
    }

    pub(crate) fn logits(&mut self, tokens: &[u32]) -> Vec<f32> {
        let mut sequence = self.sequence();
        self.extend(&mut sequence, tokens)
    }

    pub(crate) fn greedy(&mut self, prompt: &[u32], count: usize) -> Vec<u32> {
        let mut sequence = self.sequence();
        let vocabulary = self.model.spec().vocabulary;
        follow(prompt, count, vocabulary, |tokens| {
            self.extend(&mut sequence, tokens)
        })
    }
}

/// The `count` tokens that follow `prompt` when the likeliest is always taken.
fn follow(
    prompt: &[u32],
    count: usize,
    vocabulary: usize,
    mut extend: impl FnMut(&[u32]) -> Vec<f32>,
) -> Vec<u32> {
    let mut logits = extend(prompt);
    let mut tokens = Vec::new();
    for _ in 0..count {
        let row = &logits[logits.len() - vocabulary..];
        let best = (0..vocabulary)
            .max_by(|&a, &b| row[a].total_cmp(&row[b]))
            .expect("a vocabulary");
        tokens.push(u32::try_from(best).expect("a token id"));
        logits = extend(&tokens[tokens.len() - 1..]);
    }
    tokens
}

/// Tokens that are not all alike.
pub(crate) fn some_tokens(count: usize, vocabulary: usize) -> Vec<u32> {
    let token = |index: usize| u32::try_from((index * 7 + index / 5) % vocabulary);
    (0..count)
        .map(|index| token(index).expect("a token id"))
        .collect()
}

/// How far `found` is from `wanted`, relative to how long that is.
pub(crate) fn relative_l2(found: &[f32], wanted: &[f32]) -> f64 {
    assert_eq!(found.len(), wanted.len());
    let square = |x: f64| x * x;
    let pairs = found.iter().zip(wanted);
    let apart: f64 = pairs
        .map(|(a, b)| square(f64::from(*a) - f64::from(*b)))
        .sum();
    let length: f64 = wanted.iter().map(|b| square(f64::from(*b))).sum();
    (apart / length).sqrt()
}
