//! Texts are the same, token for token, whether a head has guessed or not, of the model's own files or of files of its own; and
//! it guesses whatever has become of the text before.

use lacuna_models::plan::WeightSource;
use lacuna_models::{Description, Loading};
use lacuna_pages::ByteLength;

use super::speculation::{Setting, USUAL, generation, guessing, read, requests, together};
use super::*;
use crate::error::EngineError;
use crate::speculation::{DraftCounts, Speculation};

const WITH_HEAD: Setting<'static> = Setting {
    speculation: Speculation::MTP,
    ..USUAL
};

/// Fixtures whose heads agree with them often: of one the head is in the model's files (multi-token prediction), one has it in its
/// own (EAGLE-3) and guesses some of the tokens alone, and of one it reads the model's rows (assistant).
const FIXTURES: [&str; 3] = ["heads/qwen3.5", "heads/eagle3", ASSISTED];

/// The fixture whose head keeps no rows.
const ASSISTED: &str = "heads/gemma4-assistant";

fn open(path: &str) -> ModelFiles {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference");
    ModelFiles::open(&folder.join(path)).expect("a committed fixture")
}

/// The files of a fixture, and of its head.
fn files(fixture: &str) -> (ModelFiles, Description) {
    let files = open(&format!("{fixture}/model.gguf"));
    let config = EngineConfig {
        head: FIXTURES[1..]
            .contains(&fixture)
            .then(|| Arc::new(open(&format!("{fixture}/head.gguf")))),
        ..EngineConfig::default()
    };
    let files = config.with_head(files).expect("one tensor of a name");
    let description = lacuna_models::describe(&files).expect("a model");
    (files, description)
}

/// A fixture with its head and without.
fn models(fixture: &str) -> [Arc<Model>; 2] {
    let (files, description) = files(fixture);
    let load = |description| {
        let loading = &mut ();
        Model::load_described(files.clone(), description, Loading::mapped(loading))
    };
    let models = [description.clone(), description.with_head()];
    models.map(|description| Arc::new(load(description).expect("a model")))
}

/// One that has no guesses but the head's, all of which are computed.
fn guessing_alone(model: &Arc<Model>, setting: Setting<'_>) -> Scheduler {
    let mut scheduler = guessing(model, setting);
    scheduler.config.engine.speculation = Speculation::Off;
    scheduler
}

fn greedy(prompt: impl Iterator<Item = u32>) -> Request {
    Request {
        sampling: Sampling::greedy(),
        limits: Limits {
            max_tokens: Some(64),
            ignore_eos: true,
            ..Limits::default()
        },
        ..Request::new(prompt.collect())
    }
}

fn reply(scheduler: &mut Scheduler, request: Request) -> (Vec<u32>, DraftCounts) {
    let before = scheduler.counters.drafts.model;
    let stream = enqueue(scheduler, request);
    finish(scheduler, 400);
    let after = scheduler.counters.drafts.model;
    let counts = DraftCounts {
        drafts: after.drafts - before.drafts,
        draft_tokens: after.draft_tokens - before.draft_tokens,
        accepted_tokens: after.accepted_tokens - before.accepted_tokens,
    };
    (tokens(stream), counts)
}

#[test]
fn a_head_changes_nothing_whatever_holds_rows_and_however_tokens_are_drawn() {
    FIXTURES.iter().for_each(|fixture| changes_nothing(fixture));
}

fn changes_nothing(fixture: &str) {
    let [plain, head] = models(fixture);
    let off = Setting {
        speculation: Speculation::Off,
        ..USUAL
    };
    let (expected, ..) = together(&plain, off);
    for policy in ["sparse", "dense", "paged:16", "grow:mlx"] {
        for prefix_cache in [false, true] {
            let guessed = Setting {
                policy,
                prefix_cache,
                ..WITH_HEAD
            };
            let (found, drafts, _) = together(&head, guessed);
            let what = format!("{fixture}, {policy}, {prefix_cache}: {drafts:?}");
            assert!(found == expected, "{what}");
            assert!(drafts.model.accepted_tokens > 0, "{what}");
            assert!(drafts.history.accepted_tokens > 0, "{what}");
        }
        // By the head alone.
        let mut scheduler = guessing_alone(
            &head,
            Setting {
                policy,
                ..WITH_HEAD
            },
        );
        let streams = requests()
            .into_iter()
            .map(|request| enqueue(&mut scheduler, request));
        let streams: Vec<Stream> = streams.collect();
        finish(&mut scheduler, 2000);
        let found: Vec<_> = streams.into_iter().map(read).collect();
        let drafts = scheduler.counters.drafts;
        assert!(found == expected, "{fixture}, {policy}: {drafts:?}");
        assert_eq!(drafts.history, DraftCounts::default());
        let (right, all) = (drafts.model.accepted_tokens, drafts.model.draft_tokens);
        assert!(0 < right && right < all, "{fixture}, {policy}: {drafts:?}");
        assert_eq!(
            scheduler.draft_bytes(),
            0,
            "its rows end with their sequences"
        );
    }
}

#[test]
fn a_generation_is_the_same_with_a_head() {
    FIXTURES.iter().for_each(|fixture| is_the_same(fixture));
}

fn is_the_same(fixture: &str) {
    let [plain, head] = models(fixture);
    let mut all = DraftCounts::default();
    for (place, _) in requests().iter().enumerate() {
        let request = || {
            let mut request = requests().swap_remove(place);
            request.prompt.truncate(100);
            request
        };
        let alone = |speculation| Setting {
            speculation,
            sequences: 1,
            ..USUAL
        };
        let (expected, _) = generation(&plain, request(), alone(Speculation::Off));
        let (found, drafts) = generation(&head, request(), alone(Speculation::MTP));
        assert_eq!(found, expected, "{fixture}, {place}");
        all.note(
            drafts.draft_tokens as usize,
            drafts.accepted_tokens as usize,
        );
    }
    assert!(all.accepted_tokens > 0, "{all:?}");
}

/// Rows that came from a shared prefix have no features here, and a head that has been given up is not begun again: the text
/// is the same, and of the first it guesses from what is computed.
#[test]
fn a_head_guesses_behind_a_shared_prefix_and_goes_when_memory_is_needed() {
    FIXTURES
        .iter()
        .for_each(|fixture| guesses_and_goes(fixture));
}

fn guesses_and_goes(fixture: &str) {
    let [plain, head] = models(fixture);
    let prompt = || (0..130).map(|at| 4 + at * 7 % 59);
    let setting = Setting {
        // Wide enough for the prompt to fill pages, which are shared whole.
        elements: "f32",
        prefix_cache: true,
        ..WITH_HEAD
    };
    let mut without = guessing_alone(
        &plain,
        Setting {
            speculation: Speculation::Off,
            ..setting
        },
    );
    let (expected, none) = reply(&mut without, greedy(prompt()));
    assert_eq!(none, DraftCounts::default());

    let mut scheduler = guessing_alone(&head, setting);
    for turn in 0..2 {
        let (found, counts) = reply(&mut scheduler, greedy(prompt()));
        assert_eq!(found, expected, "turn {turn}");
        let right = counts.accepted_tokens;
        assert!(
            4 * right >= counts.draft_tokens && right >= 8,
            "{fixture}, turn {turn}: {counts:?}"
        );
    }
    let reused = scheduler.prefix.tree();
    assert!(
        !reused.is_empty(),
        "the second turn had the first one's prompt"
    );

    let stream = enqueue(&mut scheduler, greedy(prompt()));
    let begun = scheduler.counters.drafts.model.draft_tokens;
    while scheduler.counters.drafts.model.draft_tokens == begun {
        scheduler.step();
    }
    if fixture == ASSISTED {
        assert_eq!(scheduler.draft_bytes(), 0, "it keeps no rows");
        assert!(!scheduler.give_up_draft(), "there is nothing to gain");
        finish(&mut scheduler, 400);
        return assert_eq!(tokens(stream), expected);
    }
    assert!(scheduler.draft_bytes() > 0, "its rows are counted");
    assert!(scheduler.give_up_draft(), "there is one");
    assert_eq!(scheduler.draft_bytes(), 0);
    let guessed = scheduler.counters.drafts.model.draft_tokens;
    finish(&mut scheduler, 400);
    assert_eq!(tokens(stream), expected);
    assert_eq!(scheduler.counters.drafts.model.draft_tokens, guessed);
}

#[test]
fn a_head_is_planned_for_where_it_is_asked_for_and_the_budget_holds_it() {
    FIXTURES.iter().for_each(|fixture| is_planned_for(fixture));
}

fn is_planned_for(fixture: &str) {
    let (of_head, described) = files(fixture);
    let config = |speculation, budget: Option<u64>| EngineConfig {
        context_tokens: Some(64),
        batch_tokens: 16,
        request_memory: Some(ByteLength::mebibytes(2)),
        speculation,
        budget: budget.map(ByteLength::new),
        ..EngineConfig::default()
    };
    let plan = |config: &EngineConfig, described: &Description| {
        let weights = lacuna_models::plan::WeightPlan::of_files(&of_head, described);
        let plan = config.plan_of(&of_head, &described.spec, weights);
        plan.expect("small enough")
    };
    let [off, mtp] = [Speculation::NGRAM, Speculation::MTP].map(|it| config(it, Some(64 << 20)));
    let without = off.guessing(&of_head, described.clone()).expect("no head");
    assert!(without.spec.head.is_none());
    let with = mtp.guessing(&of_head, described.clone()).expect("it fits");
    assert!(with.spec.head.is_some());
    let [without, with] = [(&off, &without), (&mtp, &with)].map(|(it, of)| plan(it, of));
    assert_eq!(without.residency.source, WeightSource::Direct);
    let held = |plan: &lacuna_models::plan::Plan| plan.total(0).parts;
    let [before, after] = [held(&without), held(&with)];
    // Eight matrices of the head, in whole pages, and its arena.
    assert!(after.read_weight_bytes + after.loaded() > before.read_weight_bytes + before.loaded());
    assert!(after.activation_bytes > before.activation_bytes);

    // Of a budget that does not hold all weights the head gets nothing.
    let least = without.least().bytes();
    let tight = config(Speculation::Auto, Some(least + 4096));
    let tight = tight
        .guessing(&of_head, described.clone())
        .expect("it runs");
    assert!(tight.spec.head.is_none());
    // Who asks for it is told.
    let refused = |budget: u64| {
        let tight = config(Speculation::MTP, Some(budget));
        let refused = tight.guessing(&of_head, described.clone()).map(|_| ());
        refused.expect_err("it does not fit")
    };
    let (streamed, short) = (refused(least + 4096), refused(1 << 20));
    assert!(
        matches!(streamed, EngineError::HeadOverBudget),
        "{streamed}"
    );
    assert!(matches!(short, EngineError::BudgetTooSmall(_)), "{short}");

    let refused = |config: &EngineConfig, fixture: &str| {
        let (files, described) = files(fixture);
        let refused = config.guessing(&files, described).map(|_| ());
        refused.expect_err("it cannot guess")
    };
    let none = refused(&mtp, "families/qwen3.5");
    assert!(matches!(none, EngineError::NoHead), "{none}");
    let [plain, _] = models(fixture);
    let both = EngineConfig {
        draft: crate::speculation::DraftModel::new(super::speculation::family("qwen3-yarn")).ok(),
        ..mtp
    };
    assert!(plain.program().head().is_none() && both.draft.is_some());
    let both = refused(&both, fixture);
    assert!(matches!(both, EngineError::HeadAndDraft), "{both}");
}

/// What is guessed to follow `pending`, which is drawn after `prompt` whatever the model likes.
fn guesses_after(model: &Arc<Model>, prompt: &[u32], pending: u32) -> Vec<u32> {
    let mut scheduler = guessing_alone(model, WITH_HEAD);
    let mut request = greedy(prompt.iter().copied());
    request.sampling.logit_bias = [(pending, 100.0)].into();
    let _stream = enqueue(&mut scheduler, request);
    scheduler.step();
    scheduler.schedule();
    let session = &scheduler.running[0].sessions[0];
    assert_eq!(session.choice.tokens.last(), Some(&pending));
    session.guesses().to_vec()
}

/// The head is given what belongs to each token: its guesses are those of the reference, and at any place of a reply those of
/// a text that was read at once.
#[test]
fn guesses_are_those_that_the_head_makes_of_all_tokens_before() {
    FIXTURES.iter().for_each(|fixture| guesses_of_all(fixture));
}

fn guesses_of_all(fixture: &str) {
    let [_, head] = models(fixture);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference");
    let text = std::fs::read_to_string(folder.join(fixture).join("expected.json"));
    let text = text.expect("a committed fixture");
    let numbers = |name: &str| -> Vec<u32> {
        let (_, list) = text.split_once(&format!("\"{name}\": [")).expect("a list");
        let numbers = list.split(']').next().expect("its end").split(", ");
        numbers
            .map(|number| number.parse().expect("a token"))
            .collect()
    };
    let (tokens, known) = (numbers("tokens"), numbers("guesses"));
    let (pending, prompt) = tokens.split_last().expect("tokens");
    let found = guesses_after(&head, prompt, *pending);
    assert_eq!(found[..known.len()], known);

    let mut scheduler = guessing_alone(&head, WITH_HEAD);
    let _stream = enqueue(&mut scheduler, greedy((4..24).chain(31..41)));
    let mut compared = 0;
    loop {
        scheduler.step();
        scheduler.schedule();
        let session = &scheduler.running[0].sessions[0];
        let tokens = &session.choice.tokens;
        // As many as have features at once.
        if tokens.len() > 64 {
            break;
        }
        if let (false, Some((pending, before))) =
            (session.guesses().is_empty(), tokens.split_last())
        {
            let found = guesses_after(&head, before, *pending);
            let both = found.len().min(session.guesses().len());
            assert_eq!(session.guesses()[..both], found[..both], "{}", tokens.len());
            compared += both;
        }
    }
    assert!(compared > 20, "{compared}");
}
