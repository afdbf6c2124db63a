//! What encoders and decoders compute, and the sizes that images are brought to, beside the reference implementation.

use std::collections::BTreeMap;

use lacuna_models::spec::{ImageSize, Patches};
use serde::Deserialize;

use crate::runner::{floats, relative_error};
use crate::support::{BOUND, Eyes, FORMS, MODELS, Prompt, expected, json, rows_of_images, seeing};

#[test]
fn rows_of_images_are_those_of_the_reference_from_both_kinds_of_files() {
    for model in MODELS {
        let reference = floats(&format!("vision/{model}/features.f32"));
        for [_, file] in FORMS {
            let found = rows_of_images(model, file, 1);
            let mut rest = &reference[..];
            for (index, found) in found.iter().enumerate() {
                let (wanted, tail) = rest.split_at(found.len());
                rest = tail;
                let error = relative_error(found, wanted);
                println!("{model}, {file}, image {index}: relative error {error:.2e}");
                assert!(error <= BOUND, "{model}, {file}, image {index}: {error:e}");
            }
            assert!(rest.is_empty(), "{model}, {file}");
            // And the same bits by any number of threads.
            assert!(found == rows_of_images(model, file, 3), "{model}, {file}");
        }
    }
}

#[test]
fn older_files_have_feed_forward_matrices_under_each_others_names() {
    let rows = rows_of_images("idefics3", "mmproj.gguf", 1);
    assert_eq!(rows, rows_of_images("idefics3", "older/mmproj.gguf", 1));
}

#[test]
fn logits_after_text_and_images_are_those_of_the_reference() {
    for model in MODELS {
        let expected = expected(model);
        let reference = floats(&format!("vision/{model}/logits.f32"));
        for form in FORMS {
            let rows = rows_of_images(model, form[1], 1);
            let mut runner = seeing(model, form);
            let spec = runner.model.spec();
            assert_eq!(spec.hidden, expected.width);
            let row = spec.image_row_width();
            assert_eq!(row, Some(expected.row_width()), "{model}, {form:?}");
            let mut rest = &reference[..];
            for case in 0..expected.cases.len() {
                let prompt = Prompt::of(&expected, case);
                let (wanted, tail) = rest.split_at(prompt.tokens.len() * expected.vocab);
                rest = tail;
                let found = prompt.logits(&mut runner, &rows, &[]);
                let error = relative_error(&found, wanted);
                println!("{model}, {form:?}, case {case}: relative error {error:.2e}");
                assert!(error <= BOUND, "{model}, {form:?}, case {case}: {error:e}");
            }
            assert!(rest.is_empty());
        }
    }
}

#[derive(Deserialize)]
struct Files {
    files: BTreeMap<String, File>,
}

#[derive(Deserialize)]
struct File {
    size: [usize; 2],
}

/// Sizes of images within bounds: of pixels, or of the longer side; or as large as their pixels may be.
#[derive(Deserialize)]
struct Fitted {
    #[serde(default = "least_pixels")]
    least_pixels: usize,
    #[serde(default = "most_pixels")]
    most_pixels: usize,
    longest_edge: Option<usize>,
    sizes: BTreeMap<String, [usize; 2]>,
}

fn least_pixels() -> usize {
    1
}

/// More than what is bounded by its longer side has there.
fn most_pixels() -> usize {
    40 * 40
}

#[test]
fn images_are_brought_to_the_sizes_that_the_reference_brings_them_to() {
    let files: Files = json("images/expected.json");
    for (model, list, pixels) in [
        ("qwen3-vl", "own-size", 7),
        ("mistral3", "longest-edge", 4),
        ("gemma4", "filled", 2),
    ] {
        let own = Eyes::open(model, "hf", 1).encoder.shape().patches;
        let all: Vec<Fitted> = json(&format!("images/{list}.json"));
        for expected in all {
            let size = match own.size {
                ImageSize::Filled { .. } => ImageSize::Filled {
                    square: 2,
                    most_pixels: expected.most_pixels,
                },
                _ => ImageSize::Own {
                    square: 2,
                    least_pixels: expected.least_pixels,
                    most_pixels: expected.most_pixels,
                    longest_edge: expected.longest_edge,
                },
            };
            let patches = Patches {
                pixels,
                size,
                ..own
            };
            for (name, wanted) in expected.sizes {
                assert_eq!(patches.fit(files.files[&name].size), Ok(wanted), "{name}");
            }
        }
    }
}
