//! Images in prompts of a service: encoded once for all that show them, found again by their pixels, and computed whole
//! whatever else goes on.

use std::fs;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use lacuna_engine::{
    Engine, EngineConfig, Event, Eyes, FinishReason, Generation, ImageError, Limits, Refusal,
    Request, RequestMemory, Sampling, Service, ServiceConfig, Stream,
};
use lacuna_files::ModelFiles;
use lacuna_kernels::CpuConfig;
use lacuna_models::{Model, Shown, with_images};
use lacuna_pages::ByteLength;

/// `<start_of_image>` and `<end_of_image>` of the fixture.
const MARKS: [u32; 2] = [4, 5];
/// Tokens of an image.
const TOKENS: usize = 4;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../reference/vision/gemma3")
}

fn model(name: &str) -> Arc<Model> {
    let files = ModelFiles::open(&folder().join(name)).expect("the fixture opens");
    let model = Model::load(files).expect("the fixture loads");
    Arc::new(with_images(model, None).expect("its own eyes"))
}

fn image(index: usize) -> Vec<u8> {
    fs::read(folder().join(format!("image-{index}.png"))).expect("a committed fixture")
}

fn config() -> ServiceConfig {
    let mut config = ServiceConfig::default();
    config.engine.threads = Some(NonZeroUsize::MIN);
    config.max_batched_tokens = 16;
    config.mixed_tokens = 2;
    config
}

/// A prompt of text around images.
fn prompt(eyes: &Eyes, text: &[u32], images: &[usize]) -> Request {
    let mut tokens = text.to_vec();
    for index in 0..images.len() {
        tokens.extend(MARKS);
        tokens.extend([20 + index as u32, 30]);
    }
    let files: Vec<Vec<u8>> = images.iter().map(|index| image(*index)).collect();
    let shown = eyes
        .show(&mut tokens, &files)
        .expect("images in their places");
    Request {
        images: shown,
        sampling: Sampling::greedy(),
        limits: Limits {
            max_tokens: Some(6),
            ..Limits::default()
        },
        ..Request::new(tokens)
    }
}

/// The tokens of an answer, and how many of the prompt were found computed.
fn answer(mut stream: Stream) -> (Vec<u32>, usize) {
    let (mut tokens, mut reused) = (Vec::new(), 0);
    while let Some(event) = stream.blocking_recv() {
        match event {
            Event::Started { reused_tokens, .. } => reused = reused_tokens,
            Event::Token { token, .. } => tokens.push(token),
            Event::Finished { reason, .. } => assert_ne!(reason, FinishReason::ContextFull),
            Event::Failed(failure) => panic!("{failure}"),
            Event::PromptScored(_) => {}
        }
    }
    (tokens, reused)
}

#[test]
fn an_image_shown_by_many_at_once_is_encoded_once_and_answers_are_those_of_each_alone() {
    let model = model("hf");
    let eyes = Eyes::new(
        Arc::clone(&model),
        CpuConfig {
            threads: NonZeroUsize::MIN,
            ..CpuConfig::default()
        },
        None,
    );
    let texts: Vec<Vec<u32>> = (0..16).map(|index| vec![9, 10 + index, 12, 13]).collect();
    let alone: Vec<_> = texts
        .iter()
        .map(|text| {
            let service = Service::start(Arc::clone(&model), config()).expect("a service");
            let stream = service.handle().submit(prompt(&eyes, text, &[1, 0]));
            answer(stream.expect("taken")).0
        })
        .collect();
    assert_eq!(eyes.encoded(), 2);
    let service = Service::start(model, config()).expect("a service");
    let fresh = Eyes::new(service.handle().model().clone(), CpuConfig::default(), None);
    let streams: Vec<Stream> = std::thread::scope(|scope| {
        let asked = texts.iter().map(|text| {
            let (fresh, handle) = (&fresh, service.handle());
            scope.spawn(move || handle.submit(prompt(fresh, text, &[1, 0])))
        });
        let asked: Vec<_> = asked.collect();
        let asked = asked.into_iter().map(|it| it.join().expect("no panic"));
        asked.map(|stream| stream.expect("taken")).collect()
    });
    assert_eq!(fresh.encoded(), 2, "each picture once");
    let together: Vec<_> = streams.into_iter().map(|stream| answer(stream).0).collect();
    assert_eq!(together, alone);
}

#[test]
fn computed_images_are_found_again_by_their_pixels() {
    let service = Service::start(model("hf"), config()).expect("a service");
    let handle = service.handle();
    let eyes = Eyes::new(handle.model().clone(), CpuConfig::default(), None);
    let ask = |images: &[usize]| {
        // Longer than a group of pages before and behind.
        let text: Vec<u32> = (0..70).map(|index| 9 + index % 50).collect();
        answer(handle.submit(prompt(&eyes, &text, images)).expect("taken"))
    };
    let (first, none) = ask(&[0, 1, 2]);
    assert_eq!(none, 0);
    let (again, found) = ask(&[0, 1, 2]);
    assert_eq!(again, first);
    let (_, other) = ask(&[1, 1, 2]);
    assert!(found >= other, "{found} of the same, {other} of another");
    assert!(other <= 70 + 1, "no token of another picture: {other}");
    assert_eq!(eyes.encoded(), 3);
}

#[test]
fn a_session_sees_what_a_service_does_from_both_kinds_of_files() {
    let service = Service::start(model("hf"), config()).expect("a service");
    let eyes = Eyes::new(service.handle().model().clone(), CpuConfig::default(), None);
    let request = prompt(&eyes, &[9, 11, 12], &[2, 0, 1]);
    let (tokens, images) = (request.prompt.clone(), request.images.clone());
    let (wanted, _) = answer(service.handle().submit(request).expect("taken"));
    for file in ["hf", "model.gguf"] {
        for batch_tokens in [TOKENS, 64] {
            let config = EngineConfig {
                batch_tokens,
                threads: Some(NonZeroUsize::MIN),
                ..EngineConfig::default()
            };
            let mut engine = Engine::new(model(file), &config).expect("an engine");
            let mut session = engine.session(Sampling::greedy()).expect("a session");
            session.show(images.clone());
            session.rewrite(&tokens).expect("nothing to give back");
            let limits = Limits {
                max_tokens: Some(6),
                ..Limits::default()
            };
            let mut generation = Generation::new(&mut engine, &mut session, limits);
            let generation = generation.as_mut().expect("it fits");
            while generation.next_piece().expect("a step").is_some() {}
            assert_eq!(generation.tokens(), wanted, "{file}, {batch_tokens}");
        }
    }
}

#[test]
fn what_cannot_be_seen_is_refused_and_holds_nothing() {
    let model = model("hf");
    let service = Service::start(Arc::clone(&model), config()).expect("a service");
    let memory = RequestMemory::new(ByteLength::mebibytes(4));
    let eyes = Eyes::new(
        Arc::clone(&model),
        CpuConfig::default(),
        Some(memory.clone()),
    );
    let show = |tokens: &[u32], files: &[Vec<u8>]| eyes.show(&mut tokens.to_vec(), files);
    let marks = [9, MARKS[0], MARKS[1], 9];
    assert!(matches!(show(&marks, &[]), Err(ImageError::Prompt(_))));
    assert!(matches!(
        show(&[9, 9], &[image(0)]),
        Err(ImageError::Prompt(_))
    ));
    let broken = image(0)[..200].to_vec();
    assert!(matches!(show(&marks, &[broken]), Err(ImageError::File(_))));
    let many = vec![image(0); Eyes::MOST_IMAGES + 1];
    assert!(matches!(
        show(&marks, &many),
        Err(ImageError::TooMany { .. })
    ));
    let small = RequestMemory::new(ByteLength::new(64 << 10));
    let poor = Eyes::new(Arc::clone(&model), CpuConfig::default(), Some(small));
    let refused = poor.show(&mut marks.to_vec(), &[image(0)]);
    assert!(matches!(refused, Err(ImageError::Memory(_))));
    assert_eq!(memory.status().held, ByteLength::new(0));
    assert_eq!(eyes.encoded(), 0);

    let good = prompt(&eyes, &[9, 10], &[0]);
    let submit = |change: &dyn Fn(&mut Request)| {
        let mut request = Request {
            images: good.images.clone(),
            ..Request::new(good.prompt.clone())
        };
        change(&mut request);
        service.handle().submit(request).err()
    };
    assert_eq!(submit(&|_| {}), None);
    let changes: [&dyn Fn(&mut Request); 4] = [
        &|request| request.images[0].positions = 3..8,
        &|request| request.images.push(request.images[0].clone()),
        &|request| request.prompt.truncate(request.images[0].positions.end),
        &|request| request.prompt_logprobs = Some(1),
    ];
    for change in changes {
        let refused = submit(change);
        assert!(
            matches!(refused, Some(Refusal::Image { .. })),
            "{refused:?}"
        );
    }
    let unseen = submit(&|request| request.images = Vec::<Shown>::new());
    assert!(matches!(unseen, Some(Refusal::TokenOutOfRange { .. })));
}
