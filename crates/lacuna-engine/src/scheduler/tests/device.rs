//! Requests on a device that computes: which rows come back from it, and what becomes of them when it is lost.
//!
//! The device is this machine's processor over pages of its memory, which does as it is told.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use lacuna_kernels::Cpu;
use lacuna_kv::{Geometry, KvCache, KvPolicy};
use lacuna_models::plan::ArenaPlan;
use lacuna_models::{
    ComputeDevice, DeviceLayers, Executor, ExecutorCounters, ExecutorError, ExecutorMemory,
    KernelTime, Likeliest, Scratch, TokenLogit,
};
use lacuna_pages::faults::{Completion, Faults, FaultyDevice};
use lacuna_pages::{DeviceError, HostDevice, SplitDevice};

use super::*;
use crate::row;

/// What is told to a device, and what it tells, however often it is opened.
#[derive(Debug, Default)]
struct Orders {
    /// Passes until it is lost in one, if it is.
    lost_in: Mutex<Option<usize>>,
    /// Whether it cannot be opened again.
    is_gone: AtomicBool,
    reopened: AtomicUsize,
    /// Those of the pages of the last one that was opened.
    pages: Mutex<Faults>,
    /// Passes that gave logits, and likeliest tokens, one of a row and several.
    logits: AtomicUsize,
    likeliest: AtomicUsize,
    top_k: AtomicUsize,
}

impl Orders {
    fn pass(&self) -> Result<(), DeviceError> {
        let mut left = self.lost_in.lock().expect("no panic");
        match *left {
            Some(0) => {
                *left = None;
                Err(DeviceError::Lost)
            }
            ref mut left => {
                *left = left.map(|left| left - 1);
                Ok(())
            }
        }
    }
}

#[derive(Debug, Default)]
struct FakeDevice(Arc<Orders>);

impl ComputeDevice for FakeDevice {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn reopened(&self) -> Result<Arc<dyn ComputeDevice>, ExecutorError> {
        if self.0.is_gone.load(Ordering::Relaxed) {
            let reason = "somebody took it".to_owned();
            return Err(ExecutorError::Unavailable { reason });
        }
        self.0.reopened.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(Self(Arc::clone(&self.0))))
    }

    fn kv_cache(&self, geometry: Geometry, policy: KvPolicy) -> Result<KvCache, ExecutorError> {
        let (device, faults) = FaultyDevice::new(HostDevice::new()?, Completion::Immediate);
        *self.0.pages.lock().expect("no panic") = faults;
        Ok(match geometry.host_layers() {
            0 => KvCache::on_device(device, geometry, policy)?,
            _ => KvCache::on_device(SplitDevice::new(device)?, geometry, policy)?,
        })
    }

    fn memory_for(
        &self,
        _: &Arc<Model>,
        _: &Geometry,
        _: &ArenaPlan,
    ) -> Result<ExecutorMemory, ExecutorError> {
        Ok(ExecutorMemory::default())
    }

    fn executor(
        &self,
        model: Arc<Model>,
        _: &Geometry,
        plan: &ArenaPlan,
    ) -> Result<Box<dyn Executor>, ExecutorError> {
        let scratch = Scratch::new(model.program(), plan.clone()).expect("memory");
        Ok(Box::new(FakeExecutor {
            model,
            scratch,
            likeliest: Vec::new(),
            top_k: Vec::new(),
            orders: Arc::clone(&self.0),
        }))
    }

    fn measure_copies(&self) -> Result<f64, ExecutorError> {
        Ok(0.0)
    }
}

#[derive(Debug)]
struct FakeExecutor {
    model: Arc<Model>,
    scratch: Scratch,
    likeliest: Vec<Likeliest>,
    top_k: Vec<TokenLogit>,
    orders: Arc<Orders>,
}

impl Executor for FakeExecutor {
    fn forward(&mut self, cpu: &Cpu, segments: &mut [Segment<'_>]) -> Result<&[f32], ForwardError> {
        self.orders.pass()?;
        self.orders.logits.fetch_add(1, Ordering::Relaxed);
        self.model.forward(cpu, segments, &mut self.scratch)
    }

    fn likeliest(
        &mut self,
        cpu: &Cpu,
        segments: &mut [Segment<'_>],
    ) -> Result<&[Likeliest], ForwardError> {
        self.orders.pass()?;
        self.orders.likeliest.fetch_add(1, Ordering::Relaxed);
        let logits = self.model.forward(cpu, segments, &mut self.scratch)?;
        let rows = logits.chunks_exact(self.model.spec().vocabulary);
        self.likeliest = rows
            .map(|row| Likeliest::Token(row::likeliest(row)))
            .collect();
        Ok(&self.likeliest)
    }

    fn most_top_k(&self) -> usize {
        64
    }

    fn top_k(
        &mut self,
        cpu: &Cpu,
        segments: &mut [Segment<'_>],
        count: usize,
    ) -> Result<&[TokenLogit], ForwardError> {
        self.orders.pass()?;
        self.orders.top_k.fetch_add(1, Ordering::Relaxed);
        let logits = self.model.forward(cpu, segments, &mut self.scratch)?;
        let rows = logits.chunks_exact(self.model.spec().vocabulary);
        self.top_k = rows.flat_map(|row| row::top_k(row, count)).collect();
        Ok(&self.top_k)
    }

    fn counters(&self) -> ExecutorCounters {
        ExecutorCounters::default()
    }

    fn memory(&self) -> ExecutorMemory {
        ExecutorMemory::default()
    }

    fn time_kernels(&mut self, _: bool) -> Result<(), ExecutorError> {
        Ok(())
    }

    fn kernel_times(&self) -> Result<Vec<KernelTime>, ExecutorError> {
        Ok(Vec::new())
    }
}

fn engine_config(device: Option<Arc<dyn ComputeDevice>>) -> EngineConfig {
    EngineConfig {
        budget: Some(ByteLength::mebibytes(64)),
        context_tokens: Some(512),
        batch_tokens: 64,
        sequences: 4,
        device,
        ..EngineConfig::default()
    }
}

/// A scheduler on such a device, of one request after the other.
fn on_device() -> (Scheduler, Arc<Orders>) {
    with_layers(DeviceLayers::ALL)
}

/// The same where so many layers are on the device.
fn with_layers(device_layers: DeviceLayers) -> (Scheduler, Arc<Orders>) {
    let device = FakeDevice::default();
    let orders = Arc::clone(&device.0);
    let config = ServiceConfig {
        engine: EngineConfig {
            device_layers,
            ..engine_config(Some(Arc::new(device)))
        },
        max_running: 1,
        ..ServiceConfig::default()
    };
    let engine = Engine::new(demo_model(), &config.engine).expect("this machine runs it");
    let scheduler = Scheduler::new(engine, config).expect("room for it");
    (scheduler, orders)
}

/// What the processor says after a prompt.
fn expected(prompt: std::ops::Range<u32>) -> Vec<u32> {
    let mut scheduler = scheduler();
    let stream = submit(&mut scheduler, prompt, 20);
    finish(&mut scheduler, 100);
    tokens(stream)
}

#[test]
fn logits_come_back_where_a_request_needs_them_and_else_their_likeliest_tokens() {
    let (mut scheduler, orders) = on_device();
    let stream = submit(&mut scheduler, 300..330, 20);
    finish(&mut scheduler, 100);
    assert_eq!(tokens(stream), expected(300..330));
    let count = |of: &AtomicUsize| of.swap(0, Ordering::Relaxed);
    let (rows, tokens) = (count(&orders.logits), count(&orders.likeliest));
    assert!(rows == 0 && tokens >= 20, "{rows} and {tokens}");
    let greedy = || greedy(300..330, 5);
    let penalties = crate::sampler::Penalties {
        presence: 0.5,
        ..Default::default()
    };
    let sampling = |sampling| Request {
        sampling,
        ..greedy()
    };
    let needing = [
        Request {
            logprobs: Some(0),
            ..greedy()
        },
        Request {
            prompt_logprobs: Some(0),
            ..greedy()
        },
        Request {
            limits: Limits {
                min_tokens: 5,
                ..greedy().limits
            },
            ..greedy()
        },
        sampling(Sampling {
            top_k: 0,
            ..Sampling::default()
        }),
        sampling(Sampling {
            top_k: 65,
            ..Sampling::default()
        }),
        sampling(Sampling {
            penalties,
            ..Sampling::greedy()
        }),
        sampling(Sampling {
            logit_bias: [(7, 1.0)].into(),
            ..Sampling::greedy()
        }),
    ];
    for (number, request) in needing.into_iter().enumerate() {
        enqueue(&mut scheduler, request);
        while !scheduler.is_idle() {
            scheduler.step();
            scheduler.sweep();
        }
        assert!(count(&orders.logits) > 0, "request {number}");
    }
}

/// One that draws from the likeliest has some tokens of each row come back, alone and beside one that takes the likeliest,
/// and says what it does on the processor.
#[test]
fn a_request_that_draws_from_a_few_tokens_has_these_come_back() {
    let drawing = || Request {
        sampling: Sampling {
            temperature: 3.0,
            min_p: 0.0,
            top_p: 1.0,
            seed: 7,
            ..Sampling::default()
        },
        ..greedy(300..330, 20)
    };
    let mut on_processor = scheduler();
    let drawn = enqueue(&mut on_processor, drawing());
    finish(&mut on_processor, 100);
    let drawn = tokens(drawn);
    let likeliest = expected(400..430);
    assert_ne!(drawn, expected(300..330), "the draw decides");
    for beside in [false, true] {
        let (mut scheduler, orders) = on_device();
        scheduler.config.max_running = 2;
        let first = enqueue(&mut scheduler, drawing());
        let second = beside.then(|| submit(&mut scheduler, 400..430, 20));
        finish(&mut scheduler, 100);
        assert_eq!(tokens(first), drawn);
        if let Some(second) = second {
            assert_eq!(tokens(second), likeliest);
        }
        let [logits, several] =
            [&orders.logits, &orders.top_k].map(|count| count.load(Ordering::Relaxed));
        assert!(logits == 0 && several >= 20, "{logits} and {several}");
    }
}

#[test]
fn a_lost_device_fails_what_runs_and_is_opened_again_for_what_waits() {
    let wanted = expected(300..330);
    // In the prompt, and in tokens after it.
    for passes in [0, 1, 9] {
        let (mut scheduler, orders) = on_device();
        let before = submit(&mut scheduler, 300..330, 20);
        finish(&mut scheduler, 100);
        assert_eq!(tokens(before), wanted);
        *orders.lost_in.lock().expect("no panic") = Some(passes);
        let mut first = submit(&mut scheduler, 400..440, 20);
        let second = submit(&mut scheduler, 300..330, 20);
        finish(&mut scheduler, 100);
        assert_eq!(failure(&mut first), Some(Failure::DeviceLost));
        // Nothing that the lost device had is shared with it.
        assert_eq!(tokens(second), wanted, "after {passes} passes");
        assert_eq!(orders.reopened.load(Ordering::Relaxed), 1);
        let known = scheduler.request_limits().cache.get();
        assert_eq!(known.ledger(), scheduler.engine.kv_cache().ledger());
        known.pool().verify([]).expect("the books of the new pool");
        assert_eq!(scheduler.counters.failed, 1);
    }
}

#[test]
fn a_device_that_is_lost_with_a_change_of_pages_is_opened_again_too() {
    let (mut scheduler, orders) = on_device();
    let mut first = submit(&mut scheduler, 400..440, 200);
    scheduler.step();
    orders.pages.lock().expect("no panic").lose();
    finish(&mut scheduler, 300);
    assert_eq!(failure(&mut first), Some(Failure::DeviceLost));
    assert_eq!(orders.reopened.load(Ordering::Relaxed), 0, "nobody waits");
    let second = submit(&mut scheduler, 300..330, 20);
    finish(&mut scheduler, 100);
    assert_eq!(tokens(second), expected(300..330));
    assert_eq!(orders.reopened.load(Ordering::Relaxed), 1);
}

/// Prompts that begin alike share pages of both kinds, and both go with the device.
#[test]
fn a_split_shares_prompts_and_is_what_it_was_when_its_device_is_opened_again() {
    let two = DeviceLayers::Last(std::num::NonZeroUsize::new(2).expect("two"));
    let (mut scheduler, orders) = with_layers(two);
    let wanted = expected(300..380);
    for reopened in [0, 1] {
        let first = submit(&mut scheduler, 300..380, 20);
        finish(&mut scheduler, 100);
        assert_eq!(tokens(first), wanted);
        let shared = scheduler.counters.reused_tokens;
        let second = submit(&mut scheduler, 300..380, 20);
        finish(&mut scheduler, 100);
        assert_eq!(tokens(second), wanted);
        assert!(scheduler.counters.reused_tokens > shared);
        let status = scheduler.status();
        let device = status.device.expect("a device");
        assert_eq!((device.layers, device.host_layers), (2, 2));
        let ledger = status.ledger;
        assert!(ledger.host_beside > ByteLength::ZERO && device.kv > ByteLength::ZERO);
        assert_eq!(
            ledger.host_beside.get() + device.kv.get(),
            ledger.committed.get()
        );
        assert_eq!(orders.reopened.load(Ordering::Relaxed), reopened);
        *orders.lost_in.lock().expect("no panic") = Some(1);
        let mut lost = submit(&mut scheduler, 400..440, 20);
        finish(&mut scheduler, 100);
        assert_eq!(failure(&mut lost), Some(Failure::DeviceLost));
    }
}

/// Pages of the prefix cache cannot be put aside, and requests are swapped all the same.
#[test]
fn a_split_is_swapped_and_not_kept_in_a_folder() {
    let two = DeviceLayers::Last(std::num::NonZeroUsize::new(2).expect("two"));
    let open = |config: ServiceConfig| {
        let engine = EngineConfig {
            device_layers: two,
            ..engine_config(Some(Arc::new(FakeDevice::default())))
        };
        let made = Engine::new(demo_model(), &engine).expect("this machine runs it");
        Scheduler::new(made, ServiceConfig { engine, ..config })
    };
    let folder = tempfile::tempdir().expect("a folder");
    let limit = ByteLength::mebibytes(16);
    let swap = lacuna_kv::swap::SwapConfig {
        folder: folder.path().to_owned(),
        limit,
    };
    let swapped = open(ServiceConfig {
        swap: Some(swap),
        ..ServiceConfig::default()
    });
    let status = swapped.expect("a file to swap to").status();
    assert!(status.swap.is_some() && status.aside.is_none());
    let kept = open(ServiceConfig {
        prefix_cache: crate::PrefixCacheConfig {
            folder: Some(lacuna_kv::folder::FolderConfig {
                path: folder.path().to_owned(),
                limit,
                remote: None,
                key: None,
            }),
            ..crate::PrefixCacheConfig::default()
        },
        ..ServiceConfig::default()
    });
    let told = kept
        .err()
        .expect("a folder takes no pages of two kinds")
        .to_string();
    assert!(told.contains("cannot be kept in a folder yet"), "{told}");
}

#[test]
fn requests_are_told_of_a_device_that_cannot_be_opened_until_it_can() {
    let (mut scheduler, orders) = on_device();
    *orders.lost_in.lock().expect("no panic") = Some(0);
    orders.is_gone.store(true, Ordering::Relaxed);
    let mut streams = [300, 400].map(|first| submit(&mut scheduler, first..first + 20, 5));
    finish(&mut scheduler, 10);
    assert_eq!(failure(&mut streams[0]), Some(Failure::DeviceLost));
    for mut stream in [
        streams.into_iter().next_back().expect("two"),
        submit(&mut scheduler, 500..520, 5),
    ] {
        finish(&mut scheduler, 10);
        let told = failure(&mut stream).map(|failure| failure.to_string());
        assert!(told.is_some_and(|told| told.contains("somebody took it")));
    }
    orders.is_gone.store(false, Ordering::Relaxed);
    let stream = submit(&mut scheduler, 300..330, 20);
    finish(&mut scheduler, 100);
    assert_eq!(tokens(stream), expected(300..330));
}

/// Rows of another pool have places that others have now.
#[test]
fn a_session_from_before_fails_on_the_device_that_was_opened_again() {
    let (mut scheduler, orders) = on_device();
    let engine = scheduler.engine().expect("an engine");
    let mut old = engine.session(Sampling::greedy()).expect("a session");
    old.extend(&[300, 301, 302]);
    engine.step(&mut old).expect("room");
    *orders.lost_in.lock().expect("no panic") = Some(0);
    let is_lost = |result: Result<Option<u32>, EngineError>| {
        let lost = ForwardError::Device(DeviceError::Lost).to_string();
        result.is_err_and(|error| error.to_string() == lost)
    };
    assert!(is_lost(engine.step(&mut old)));
    assert!(engine.has_lost_device());
    scheduler.revive().expect("it is there");
    let engine = scheduler.engine().expect("an engine");
    assert!(!engine.has_lost_device());
    assert!(is_lost(engine.step(&mut old)), "its rows are gone");
    assert!(!engine.has_lost_device(), "and the device is there");
    let mut new = engine.session(Sampling::greedy()).expect("a session");
    new.extend(&[300, 301, 302]);
    engine.step(&mut new).expect("room");
}
