//! How images stand in prompts.

use lacuna_models::spec::Grid;
use lacuna_models::{ImageTokens, PromptError};
use lacuna_text::tokenizer::Special;

use crate::support::{FORMS, Prompt, expected, read, seeing, stand_ins};

#[test]
fn images_are_cut_and_stand_in_prompts_as_the_reference_has_them() {
    let expected = expected("idefics3");
    for form in FORMS {
        let model = seeing("idefics3", form).model;
        let shape = *model.images().expect("it sees").shape();
        for (index, image) in expected.images.iter().enumerate() {
            let file = read(&format!("vision/idefics3/image-{index}.png"));
            let side = |at: usize| u32::from_be_bytes(file[at..at + 4].try_into().expect("four"));
            let sizes = shape.tiled([side(16) as usize, side(20) as usize]);
            assert_eq!(sizes.expect("it is cut").tiles, image.tiles(), "{index}");
        }
        for (case, about) in expected.cases.iter().enumerate() {
            let wanted = Prompt::of(&expected, case);
            let images = about.shown.iter().map(|image| {
                let image = expected.images[*image];
                let picture: Vec<u32> = stand_ins(image.tokens().count()).collect();
                ImageTokens {
                    tiles: image.tiles(),
                    pictures: vec![picture; image.pictures()],
                }
            });
            let images: Vec<ImageTokens> = images.collect();
            let tokens = model.tokenizer().encode(&about.text, Special::RENDERED);
            let mut tokens = tokens.expect("short");
            let one_less = &images[1..];
            let refused = model.place_images(&mut tokens.clone(), one_less);
            assert!(matches!(refused, Err(PromptError::ImageCount { .. })));
            let places = model.place_images(&mut tokens, &images).expect("places");
            assert_eq!(tokens, wanted.tokens, "{form:?}: {}", about.text);
            let all = wanted.runs.iter().map(|run| run.positions.clone());
            assert_eq!(places, all.collect::<Vec<_>>(), "{form:?}: {}", about.text);
        }
    }
}

#[test]
fn images_stand_in_prompts_row_by_row() {
    for model in ["pixtral", "mistral3"] {
        let expected = expected(model);
        for form in FORMS {
            let model = seeing(model, form).model;
            let shape = *model.images().expect("it sees").shape();
            let first = expected.images[0].tokens();
            let (runs, grid) = shape.runs(first);
            assert_eq!((runs, grid), (first.rows, Grid::row(first.columns)));
            // What a template writes has one mark for an image, the reference's prompt its rows and what is between.
            let prompt = Prompt::of(&expected, 0);
            let start = prompt.runs[0].positions.start;
            let end = prompt.runs.last().expect("a row").positions.end + 1;
            let mark = model.tokenizer().encode("[IMG]", Special::RENDERED);
            let mark = mark.expect("short");
            let mut tokens = [&prompt.tokens[..start], &mark, &prompt.tokens[end..]].concat();
            let image = ImageTokens {
                tiles: Grid::NONE,
                pictures: vec![stand_ins(first.columns).collect(); runs],
            };
            let places = model.place_images(&mut tokens, &[image]).expect("places");
            assert_eq!(tokens, prompt.tokens);
            let wanted = prompt.runs.iter().map(|run| run.positions.clone());
            assert_eq!(places, wanted.collect::<Vec<_>>());
        }
    }
}

#[test]
fn images_stand_between_marks_where_templates_write_one_for_each() {
    for model in ["gemma4", "gemma4-dense"] {
        let expected = expected(model);
        for form in FORMS {
            let model = seeing(model, form).model;
            let wanted = Prompt::of(&expected, 1);
            let text = |from: usize, to: usize| wanted.tokens[from..to].to_vec();
            // What is between the reference's images and their marks, with what is written for what a template has for each.
            let [begin, end] =
                ["<|image>", "<image|>"].map(|mark| model.tokenizer().id(mark).expect("it has it"));
            let prompt = model.spec().images.expect("it takes images").prompt;
            assert_eq!(prompt.mark, "<|image|>");
            let written = model.tokenizer().encode(prompt.written, Special::RENDERED);
            let written = written.expect("short");
            let (mut tokens, mut behind) = (Vec::new(), 0);
            for run in &wanted.runs {
                let before = text(behind, run.positions.start);
                assert_eq!(before.last(), Some(&begin));
                assert_eq!(wanted.tokens[run.positions.end], end);
                tokens.extend_from_slice(&before[..before.len() - 1]);
                tokens.extend_from_slice(&written);
                behind = run.positions.end + 1;
            }
            tokens.extend(text(behind, wanted.tokens.len()));
            let images = wanted
                .runs
                .iter()
                .map(|run| ImageTokens::one(stand_ins(run.positions.len()).collect()));
            let images: Vec<ImageTokens> = images.collect();
            let places = model.place_images(&mut tokens, &images).expect("places");
            assert_eq!(tokens, wanted.tokens, "{form:?}");
            let all = wanted.runs.iter().map(|run| run.positions.clone());
            assert_eq!(places, all.collect::<Vec<_>>(), "{form:?}");
        }
    }
}
