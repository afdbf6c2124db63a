//! Images in prompts of a service: encoded once for all that show them, found again by their pixels, and computed whole
//! whatever else goes on.

use std::fs;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use lacuna_engine::{
    Engine, EngineConfig, Event, Eyes, FinishReason, Generation, ImageError, Limits, Refusal,
    Request, RequestMemory, Sampling, Service, ServiceConfig, Session, Speculation, Stream,
};
use lacuna_files::ModelFiles;
use lacuna_kernels::CpuConfig;
use lacuna_kv::saved::Saved;
use lacuna_models::{Model, Shown, with_images};
use lacuna_pages::ByteLength;

/// A tiny model that sees.
#[derive(Debug, Clone, Copy)]
struct Fixture {
    name: &'static str,
    /// What its template writes for an image.
    marks: &'static [u32],
    /// Tokens before those of a picture where that is.
    before: usize,
    /// Pictures that each of the first images is.
    pictures: [u64; 3],
    /// Tokens of the largest picture.
    tokens: usize,
    /// The least step that a prompt with it can be computed by.
    step: usize,
}

/// With images of one size, which are computed whole: between `<start_of_image>` and `<end_of_image>`.
const GEMMA: Fixture = Fixture {
    name: "gemma3",
    marks: &[4, 5],
    before: 1,
    pictures: [1; 3],
    tokens: 4,
    step: 4,
};

/// With images of their own shapes and positions of several numbers: between `<|vision_start|>` and `<|vision_end|>`.
const QWEN: Fixture = Fixture {
    name: "qwen3-vl",
    marks: &[3, 5, 4],
    before: 2,
    pictures: [1; 3],
    tokens: 16,
    step: 1,
};

/// With images in tiles, each a picture between marks of its own: in the place of `<image>`.
const IDEFICS: Fixture = Fixture {
    name: "idefics3",
    marks: &[4],
    before: 2,
    pictures: [3, 3, 5],
    tokens: 4,
    step: 1,
};

/// With tokens between the rows of an image: in the place of `[IMG]`.
const PIXTRAL: Fixture = Fixture {
    name: "mistral3",
    marks: &[5],
    before: 0,
    pictures: [1; 3],
    tokens: 4,
    step: 1,
};

const ALL: [Fixture; 4] = [GEMMA, QWEN, IDEFICS, PIXTRAL];

impl Fixture {
    fn folder(self) -> PathBuf {
        let vision = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../reference/vision");
        vision.join(self.name)
    }

    fn model(self, name: &str) -> Arc<Model> {
        let files = ModelFiles::open(&self.folder().join(name)).expect("the fixture opens");
        let model = Model::load(files).expect("the fixture loads");
        Arc::new(with_images(model, None).expect("its own eyes"))
    }

    fn image(self, index: usize) -> Vec<u8> {
        let file = self.folder().join(format!("image-{index}.png"));
        fs::read(file).expect("a committed fixture")
    }

    /// A prompt of text around images.
    fn prompt(self, eyes: &Eyes, text: &[u32], images: &[usize]) -> Request {
        let mut tokens = text.to_vec();
        for index in 0..images.len() {
            tokens.extend(self.marks);
            tokens.extend([20 + index as u32, 30]);
        }
        let files: Vec<Vec<u8>> = images.iter().map(|index| self.image(*index)).collect();
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
}

fn config() -> ServiceConfig {
    let mut config = ServiceConfig::default();
    config.engine.threads = Some(NonZeroUsize::MIN);
    config.max_batched_tokens = 16;
    config.mixed_tokens = 2;
    config
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
    ALL.into_iter().for_each(shown_by_many_at_once);
}

fn shown_by_many_at_once(fixture: Fixture) {
    let model = fixture.model("hf");
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
            let stream = service
                .handle()
                .submit(fixture.prompt(&eyes, text, &[1, 0]));
            answer(stream.expect("taken")).0
        })
        .collect();
    let pictures = fixture.pictures[..2].iter().sum::<u64>();
    assert_eq!(eyes.encoded(), pictures);
    let service = Service::start(model, config()).expect("a service");
    let fresh = Eyes::new(service.handle().model().clone(), CpuConfig::default(), None);
    let streams: Vec<Stream> = std::thread::scope(|scope| {
        let asked = texts.iter().map(|text| {
            let (fresh, handle) = (&fresh, service.handle());
            scope.spawn(move || handle.submit(fixture.prompt(fresh, text, &[1, 0])))
        });
        let asked: Vec<_> = asked.collect();
        let asked = asked.into_iter().map(|it| it.join().expect("no panic"));
        asked.map(|stream| stream.expect("taken")).collect()
    });
    assert_eq!(fresh.encoded(), pictures, "each picture once");
    let together: Vec<_> = streams.into_iter().map(|stream| answer(stream).0).collect();
    assert_eq!(together, alone);
}

#[test]
fn computed_images_are_found_again_by_their_pixels() {
    ALL.into_iter().for_each(found_again);
}

fn found_again(fixture: Fixture) {
    let service = Service::start(fixture.model("hf"), config()).expect("a service");
    let handle = service.handle();
    let eyes = Eyes::new(handle.model().clone(), CpuConfig::default(), None);
    let ask = |images: &[usize]| {
        // Longer than a group of pages before and behind.
        let text: Vec<u32> = (0..70).map(|index| 9 + index % 50).collect();
        answer(
            handle
                .submit(fixture.prompt(&eyes, &text, images))
                .expect("taken"),
        )
    };
    let (first, none) = ask(&[0, 1, 2]);
    assert_eq!(none, 0);
    let (again, found) = ask(&[0, 1, 2]);
    assert_eq!(again, first);
    let (_, other) = ask(&[1, 1, 2]);
    assert!(found >= other, "{found} of the same, {other} of another");
    let before = 70 + fixture.before;
    assert!(other <= before, "no token of another picture: {other}");
    assert_eq!(eyes.encoded(), fixture.pictures.iter().sum::<u64>());
}

/// The token before a picture comes up again in what is written. What followed it was guessed to follow, which is no token.
#[test]
fn guesses_from_a_prompt_with_images_leave_answers_as_they_are() {
    for fixture in ALL {
        let model = fixture.model("hf");
        let eyes = Eyes::new(Arc::clone(&model), CpuConfig::default(), None);
        let answers = [Speculation::Off, Speculation::NGRAM].map(|speculation| {
            let mut config = config();
            config.engine.speculation = speculation;
            let service = Service::start(Arc::clone(&model), config).expect("a service");
            let answers = (0..8).map(|seed| {
                let prompt = fixture.prompt(&eyes, &[9, 11, 12], &[1, 0]);
                let request = Request {
                    sampling: Sampling {
                        seed,
                        ..Sampling::default()
                    },
                    limits: Limits {
                        max_tokens: Some(100),
                        ignore_eos: true,
                        ..Limits::default()
                    },
                    ..prompt
                };
                answer(service.handle().submit(request).expect("taken")).0
            });
            answers.collect::<Vec<_>>()
        });
        assert_eq!(answers[1], answers[0], "{fixture:?}");
    }
}

#[test]
fn a_session_sees_what_a_service_does_from_both_kinds_of_files() {
    ALL.into_iter().for_each(session_and_service);
}

fn session_and_service(fixture: Fixture) {
    let service = Service::start(fixture.model("hf"), config()).expect("a service");
    let eyes = Eyes::new(service.handle().model().clone(), CpuConfig::default(), None);
    let request = fixture.prompt(&eyes, &[9, 11, 12], &[2, 0, 1]);
    let longest = request.images.iter().map(|image| image.positions.len());
    assert_eq!(longest.max(), Some(fixture.tokens));
    let (tokens, images) = (request.prompt.clone(), request.images.clone());
    let (wanted, _) = answer(service.handle().submit(request).expect("taken"));
    for file in ["hf", "model.gguf"] {
        for batch_tokens in [fixture.step, 5, 64] {
            let mut engine = engine(fixture, file, batch_tokens);
            let mut session = engine.session(Sampling::greedy()).expect("a session");
            session.show(images.clone());
            session.rewrite(&tokens).expect("nothing to give back");
            let found = generated(&mut engine, &mut session);
            assert_eq!(found, wanted, "{fixture:?}, {file}, {batch_tokens}");
        }
    }
}

fn engine(fixture: Fixture, file: &str, batch_tokens: usize) -> Engine {
    let config = EngineConfig {
        batch_tokens,
        threads: Some(NonZeroUsize::MIN),
        ..EngineConfig::default()
    };
    Engine::new(fixture.model(file), &config).expect("an engine")
}

/// The tokens of an answer in a session.
fn generated(engine: &mut Engine, session: &mut Session) -> Vec<u32> {
    let limits = Limits {
        max_tokens: Some(6),
        ..Limits::default()
    };
    let mut generation = Generation::new(engine, session, limits);
    let generation = generation.as_mut().expect("it fits");
    while generation.next_piece().expect("a step").is_some() {}
    generation.tokens().to_vec()
}

/// What comes behind an image depends on how many rows and columns it had, though nobody shows it again.
#[test]
fn forks_and_saved_sessions_go_on_behind_images_as_the_session_would() {
    for fixture in ALL {
        let mut engine = engine(fixture, "hf", 64);
        let eyes = Eyes::new(fixture.model("hf"), CpuConfig::default(), None);
        let request = fixture.prompt(&eyes, &[9, 11, 12], &[1, 0]);
        let mut session = engine.session(Sampling::greedy()).expect("a session");
        session.show(request.images.clone());
        session
            .rewrite(&request.prompt)
            .expect("nothing to give back");
        generated(&mut engine, &mut session);
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("session");
        let saved = engine.save_session(&mut session, "", &path);
        saved.expect("it is written");
        let sampler = session.sampler().clone();
        let mut fork = session.fork(sampler).expect("memory");
        let mut saved = Saved::open(&path).expect("it was written");
        let restored = engine.restore_session(&mut saved, Sampling::greedy(), &path);
        let mut restored = restored.expect("of the same model");
        let answers = [&mut session, &mut fork, &mut restored].map(|session| {
            session.extend(&[13, 14, 15]);
            generated(&mut engine, session)
        });
        assert_eq!(answers[1], answers[0], "{fixture:?}, forked");
        assert_eq!(answers[2], answers[0], "{fixture:?}, restored");
    }
}

#[test]
fn what_cannot_be_seen_is_refused_and_holds_nothing() {
    ALL.into_iter().for_each(refused);
}

fn refused(fixture: Fixture) {
    let model = fixture.model("hf");
    let service = Service::start(Arc::clone(&model), config()).expect("a service");
    let memory = RequestMemory::new(ByteLength::mebibytes(4));
    let eyes = Eyes::new(
        Arc::clone(&model),
        CpuConfig::default(),
        Some(memory.clone()),
    );
    let show = |tokens: &[u32], files: &[Vec<u8>]| eyes.show(&mut tokens.to_vec(), files);
    let marks = [&[9], fixture.marks, &[9]].concat();
    assert!(matches!(show(&marks, &[]), Err(ImageError::Prompt(_))));
    assert!(matches!(
        show(&[9, 9], &[fixture.image(0)]),
        Err(ImageError::Prompt(_))
    ));
    let broken = fixture.image(0)[..200].to_vec();
    let two = [marks.clone(), marks.clone()].concat();
    let first = show(&two, &[broken.clone(), fixture.image(0)]);
    assert!(
        matches!(&first, Err(ImageError::One { number: 1, count: 2, error }) if matches!(**error, ImageError::File(_))),
        "{first:?}"
    );
    assert!(matches!(show(&marks, &[broken]), Err(ImageError::File(_))));
    let many = vec![fixture.image(0); Eyes::MOST_IMAGES + 1];
    assert!(matches!(
        show(&marks, &many),
        Err(ImageError::TooMany { .. })
    ));
    let small = RequestMemory::new(ByteLength::new(64 << 10));
    let poor = Eyes::new(Arc::clone(&model), CpuConfig::default(), Some(small));
    let refused = poor.show(&mut marks.clone(), &[fixture.image(0)]);
    assert!(matches!(refused, Err(ImageError::Memory(_))));
    assert_eq!(memory.status().held, ByteLength::new(0));
    assert_eq!(eyes.encoded(), 0);

    let good = fixture.prompt(&eyes, &[9, 10], &[0]);
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

/// `image` with a header that says that it has so many pixels.
fn claiming(mut image: Vec<u8>, size: [u32; 2]) -> Vec<u8> {
    for (at, side) in [(16, size[0]), (20, size[1])] {
        image[at..at + 4].copy_from_slice(&side.to_be_bytes());
    }
    let header = image[12..29].iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0xedb8_8320 * (crc & 1))
        })
    });
    image[29..33].copy_from_slice(&(!header).to_be_bytes());
    image
}

#[test]
fn images_of_shapes_that_nobody_has_are_refused_by_their_headers() {
    let memory = RequestMemory::new(ByteLength::mebibytes(64));
    let eyes = Eyes::new(QWEN.model("hf"), CpuConfig::default(), Some(memory.clone()));
    let show = |size| {
        let file = claiming(QWEN.image(0), size);
        eyes.show(&mut QWEN.marks.to_vec(), &[file])
    };
    let long = show([1, 20_000]).expect_err("longer than any");
    assert!(matches!(long, ImageError::Shape(_)), "{long}");
    assert!(long.to_string().contains("1 x 20000"), "{long}");
    assert!(matches!(show([7000, 30]), Err(ImageError::Shape(_))));
    // As long as it may be, but there are not as many pixels: it ends too early.
    assert!(matches!(show([20, 4000]), Err(ImageError::File(_))));
    let vast = show([7000, 7000]).expect_err("more than there is memory for");
    assert!(matches!(vast, ImageError::Memory(_)), "{vast}");
    assert!(matches!(show([60_000, 60_000]), Err(ImageError::File(_))));
    assert_eq!(memory.status().held, ByteLength::new(0));
    // None is larger than what a pass was planned for.
    let model = QWEN.model("hf");
    let shape = *model.images().expect("it sees").shape();
    for size in [[4032, 3024], [200, 1], [1, 200], [50_000, 1000]] {
        let fitted = shape.fit(size).expect("of a shape that is taken");
        let grid = shape.grid(fitted);
        assert!(grid.count() <= shape.most().tokens, "{size:?}: {grid:?}");
    }
}

/// Each of the tiles that a long image is made to is looked at; its size is what takes memory.
#[test]
fn long_images_are_as_many_tiles_as_others_and_vast_ones_take_memory() {
    let memory = RequestMemory::new(ByteLength::mebibytes(64));
    let model = IDEFICS.model("hf");
    let eyes = Eyes::new(model, CpuConfig::default(), Some(memory.clone()));
    let show = |size| {
        let file = claiming(IDEFICS.image(0), size);
        eyes.show(&mut IDEFICS.marks.to_vec(), &[file])
    };
    // There are not as many pixels: it ends too early.
    assert!(matches!(show([1, 20_000]), Err(ImageError::File(_))));
    let vast = show([7000, 7000]).expect_err("more than there is memory for");
    assert!(matches!(vast, ImageError::Memory(_)), "{vast}");
    let mut long = IDEFICS.marks.to_vec();
    // A pixel wide and 120 high, which becomes two tiles.
    let shown = eyes.show(&mut long, &[IDEFICS.image(3)]).expect("small");
    assert_eq!(shown.len(), 3);
    assert_eq!(memory.status().held, ByteLength::new(0));
}

/// Encoding takes seconds an image, and a prompt that no context holds was refused only behind it.
#[test]
fn prompts_that_are_too_long_with_their_images_are_refused_before_any_is_encoded() {
    for fixture in ALL {
        let model = fixture.model("hf");
        let mut long = fixture.marks.to_vec();
        let shown = Eyes::new(Arc::clone(&model), CpuConfig::default(), None)
            .show(&mut long, &[fixture.image(0)])
            .expect("it fits the model's context");
        let of_images: usize = shown.iter().map(|shown| shown.positions.len()).sum();
        let needed = fixture.marks.len() - 1 + of_images;
        let eyes = Eyes::new(model, CpuConfig::default(), None).within(needed - 1);
        let mut tokens = fixture.marks.to_vec();
        let error = eyes.show(&mut tokens, &[fixture.image(0)]);
        let error = error.expect_err("a token too many");
        let ImageError::TooManyTokens { prompt, context } = error else {
            panic!("{error}")
        };
        assert_eq!((prompt, context), (needed, needed - 1));
        assert_eq!((eyes.encoded(), &tokens[..]), (0, fixture.marks));
    }
}
