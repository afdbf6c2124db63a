//! What the library's callers set is theirs to name: every field of the settings, and what sessions take and give, with
//! this crate as the only dependency.

use std::error::Error;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use lacuna::{
    Accounting, BlockWatch, CacheKey, ComputeDevice, DeviceLayers, Engine, EngineConfig,
    FiniteCheck, FolderConfig, Generation, HeldMemory, KvElements, KvPolicy, Layout, Limits, Model,
    Namespace, Piece, PrecisionMode, PrefixCacheConfig, Request, RequestMemory, Sampler, Sampling,
    Saved, Service, ServiceConfig, SessionId, Shown, Speculation, StopText, SwapConfig, Timing,
};

/// All fields, so that a new one whose type has no name here does not compile.
fn engine_config() -> EngineConfig {
    EngineConfig {
        threads: Some(NonZeroUsize::MIN),
        matmul_precision: PrecisionMode::default(),
        kv_policy: KvPolicy::Sparse(Layout::TokenMajor),
        kv_elements: KvElements::default(),
        context_tokens: Some(256),
        batch_tokens: 64,
        sequences: 1,
        logits: lacuna::plan::Logits::Last,
        finite_check: FiniteCheck::Off,
        budget: None,
        request_memory: None,
        accounting: Accounting::Planned,
        weights: lacuna::plan::WeightMode::default(),
        speculation: Speculation::default(),
        draft: None::<lacuna::DraftModel>,
        head: None::<Arc<lacuna::ModelFiles>>,
        neurons: None,
        device: None::<Arc<dyn ComputeDevice>>,
        device_layers: DeviceLayers::default(),
    }
}

fn service_config() -> ServiceConfig {
    ServiceConfig {
        engine: engine_config(),
        max_running: 4,
        max_waiting: 4,
        max_batched_tokens: 64,
        mixed_tokens: 16,
        prefix_cache: PrefixCacheConfig {
            enabled: true,
            time_to_live: None,
            folder: None::<FolderConfig>,
        },
        swap: None::<SwapConfig>,
        unread_patience: Duration::from_secs(30),
        shared_requests: None::<RequestMemory>,
        blocks: None::<BlockWatch>,
    }
}

fn limits() -> Limits {
    Limits {
        max_tokens: Some(4),
        min_tokens: 0,
        stop: Vec::new(),
        stop_tokens: Vec::new(),
        stop_text: StopText::Hide,
        ignore_eos: true,
        special: lacuna::SpecialText::Skip,
    }
}

fn request() -> Request {
    Request {
        prompt: vec![1, 2, 3],
        images: Vec::<Shown>::new(),
        choices: NonZeroUsize::MIN,
        sampling: Sampling::greedy(),
        limits: limits(),
        logprobs: None,
        prompt_logprobs: None,
        constraint: None,
        deadline: None,
        prefix_namespace: Namespace::new(7),
        pin_prefix: None,
        session: None::<SessionId>,
        memory: None::<HeldMemory>,
        priority: 0,
    }
}

#[test]
fn sessions_are_forked_saved_and_restored() -> Result<(), Box<dyn Error>> {
    let model = Arc::new(Model::load(lacuna::demo())?);
    let mut engine = Engine::new(model, &engine_config())?;
    let mut session = engine.session(Sampling::greedy())?;
    session.extend(&[1, 2, 3]);
    let mut fork = session.fork(Sampler::new(Sampling::default())?)?;
    let mut generation = Generation::new(&mut engine, &mut fork, limits())?;
    while generation.next_piece()?.is_some() {}
    let timing: Timing = generation.timing();
    assert_eq!(timing.computed_prompt_tokens, 3);

    let folder = tempfile::tempdir()?;
    let path = folder.path().join("a.session");
    engine.save_session(&mut fork, "a note", &path)?;
    let mut saved = Saved::open(&path)?;
    let restored = engine.restore_session(&mut saved, Sampling::greedy(), &path)?;
    assert_eq!(restored.tokens(), fork.tokens());
    Ok(())
}

#[test]
fn services_take_requests_and_sessions() -> Result<(), Box<dyn Error>> {
    let model = Arc::new(Model::load(lacuna::demo())?);
    let service = Service::start(model, service_config())?;
    let mut stream = service.handle().submit(request())?;
    while let Some(event) = stream.blocking_recv() {
        if let lacuna::Event::Failed(failure) = event {
            return Err(failure.into());
        }
    }
    let mut session = service.handle().session()?;
    session.extend(&[1, 2, 3]);
    let mut continuation = session.begin(Sampling::greedy(), &limits())?;
    let mut last: Option<Piece> = None;
    while let Some(piece) = session.advance(&mut continuation)? {
        last = Some(piece);
    }
    let last = last.ok_or("a text of four tokens has pieces")?;
    assert_eq!(last.finish, Some(lacuna::FinishReason::MaxTokens));
    Ok(())
}

/// A folder's key is read where settings are, and its type is named there.
#[test]
fn a_folder_may_have_a_key() {
    let folder = FolderConfig {
        path: "unused".into(),
        limit: lacuna::ByteLength::mebibytes(1),
        remote: None,
        key: None::<CacheKey>,
    };
    assert_eq!(folder.key, None);
}
